// The micro-kernels of matrix products, which hold sums in registers, and the packing of their operands.
//
// Each sum adds its terms in order, with one rounding each (FMA; pairs as the machine's instruction rounds them). Dot
// products have one such sum per lane of a register.
namespace pv {

// c[R, C registers] (+)= a[R, k] @ b[k, C registers], with k units. F: the type of a, in which the terms of a unit are
// contiguous.
template <int R, int C, class F, class Right>
PV_FN void tile(int64_t k, const Matrix<F>& a, Right b, const Sums& c, Prefetcher& prefetcher) {
  constexpr int THIRDS = (R + 2) / 3;
  ColumnReg sum[R][C] = {};
  const F* rows[THIRDS];  // every third row: the others are addressed relative to it
#pragma GCC unroll 4
  for (int i = 0; i < THIRDS; i++) rows[i] = a(3 * i, 0);
#pragma GCC unroll 2
  for (; k > 0; k--) {
    prefetcher.step();
    ColumnReg right[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; j++) right[j] = b.read(j * COLUMN);
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) {
      const ColumnReg each = broadcast_unit(rows[i / 3] + i % 3 * a.row);
#pragma GCC unroll 2
      for (int j = 0; j < C; j++) sum[i][j] = multiply_units<F>(each, right[j], sum[i][j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < THIRDS; i++) rows[i] += TERMS<F> * a.column;
    b.next();
  }
  const auto each = [&](auto f) PV_INLINE {
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
      for (int j = 0; j < C; j++) f(c.at + i * c.step + j * COLUMN, sum[i][j]);
  };
  const auto sum_at = [](const float* to, ColumnReg more) PV_INLINE { return read_column(to) + more; };
  const bool past = c.past && is_aligned(c);
  if (past && c.more) each([&](float* to, ColumnReg a) PV_INLINE { stream_aligned(to, sum_at(to, a)); });
  else if (past) each([](float* to, ColumnReg a) PV_INLINE { stream_aligned(to, a); });
  else if (c.more) each([&](float* to, ColumnReg a) PV_INLINE { write_column(to, sum_at(to, a)); });
  else each([](float* to, ColumnReg a) PV_INLINE { write_column(to, a); });
}

// `tile` for `count` times R rows.
template <int R, int C, class F, class Right>
[[gnu::noinline]] inline void tiles_of(
    int64_t count, int64_t k, LeftRows<F> a, const Right& b, Sums c, Prefetcher& prefetcher) {
  Prefetcher local = prefetcher;
  for (; count > 0; count--, a.rows.at += a.group, c.at += R * c.step) tile<R, C>(k, a.rows, b, c, local);
  prefetcher = local;
}
// `tile` for any number of rows up to R.
template <int C, int R = ROWS - 1, class F, class Right>
PV_FN void last_tile(
    int64_t rows, int64_t k, const LeftRows<F>& a, const Right& b, const Sums& c, Prefetcher& prefetcher) {
  if (rows == R) return tiles_of<R, C>(1, k, a, b, c, prefetcher);
  if constexpr (R > 1) last_tile<C, R - 1>(rows, k, a, b, c, prefetcher);
}
// `tile` for m rows.
template <int C, class F, class Right>
PV_SHARED void tiles(
    BlockState& state, int64_t m, int64_t k, const LeftRows<F>& a, const Right& b, const Sums& c) {
  if constexpr (BY_AMX<F> && std::is_same_v<Right, Rows>)
    if (a.rows.column == 1) return amx_tiles<C>(state.amx, state.prefetcher, m, k, a.rows, b, c);
  const int64_t count = m / ROWS, done = count * ROWS;
  if (count > 0) tiles_of<ROWS, C>(count, k, a, b, c, state.prefetcher);
  if (done < m) last_tile<C>(m - done, k, a.after(count), b, c.from(done, 0), state.prefetcher);
}

// c[m, n] (+)= a[m, k] @ b[k, n] for the n columns of a panel, with k units. WIDTH: columns of all panels together, 0
// if unknown. If the columns of the last panel fit in one register, only one is computed. Columns from n on, up to a
// whole register, are overwritten.
template <int WIDTH, class F, class Right>
PV_FN void panel(
    BlockState& state, int64_t m, int64_t n, int64_t k, const LeftRows<F>& a, const Right& b, const Sums& c) {
  constexpr bool half = WIDTH > 0 && (WIDTH - 1) % COLUMNS < COLUMN;
  if constexpr (half)
    if (WIDTH <= COLUMN || n <= COLUMN) return tiles<1>(state, m, k, a, b, c);
  if constexpr (!half || WIDTH > COLUMN) tiles<2>(state, m, k, a, b, c);
}

// ------------------------------------------------------------------------------------------------- packing

// Panels of COLUMNS columns, with space for `depth` units each: unit (i, p * COLUMNS + j) is at [p][i][j]. Columns past
// the last one are zero, and so is the second term of a last unit that has one term. finite: whether all elements are.
struct Panels {
  const float* at;
  int64_t depth;
  bool finite;
  PV_FN const float* operator()(int64_t i, int64_t j) const {
    return at + j / COLUMNS * COLUMNS * depth + i * COLUMNS + j % COLUMNS;
  }
  PV_FN Panels from(int64_t i, int64_t j) const { return {(*this)(i, j), depth, finite}; }
};
template <class Right> constexpr bool is_packed = std::is_same_v<Right, Panels>;

// Floats of a panel of DEPTH units, which are packed at a time.
constexpr int COLUMN_PANEL = COLUMNS * DEPTH;

// Number of units to prefetch ahead: the hardware does not prefetch across lines of a matrix that are in different
// pages.
constexpr int64_t PREFETCH_UNITS = 8;
// Prefetch N elements of a line, or of each line of a unit; step: elements between these lines.
template <int N, class E> PV_FN void prefetch(const E* line) {
  for (int i = 0; i < N * int(sizeof(E)); i += LINE) __builtin_prefetch((const char*)line + i);
}
template <int N, class E> PV_FN void prefetch_unit(const E* line, int64_t step) {
  for (int t = 0; t < TERMS<E>; t++) prefetch<N>(line + t * step);
}

// The order of units in panels: unit i of b becomes unit order(i).
struct InOrder {
  PV_FN int64_t operator()(int64_t i) const { return i; }
};

// Pack terms from `first` on, the beginning of a unit, element by element. F: the type of terms of units. panel: floats
// from one panel to the next.
template <class F, class B, class Order>
[[gnu::noinline]] inline void pack_elements(
    const B& b, int64_t first, int64_t k, int64_t n, float* panels, int64_t panel, const Order& order) {
  constexpr int T = TERMS<F>;
  const int64_t columns = panels_of(n);
  for (int64_t i = first; i < units_of<F>(k) * T; i++)
    for (int64_t j = 0; j < columns; j++) {
      auto* unit = (F*)(panels + j / COLUMNS * panel + order(i / T) * COLUMNS + j % COLUMNS);
      unit[i % T] = i < k && j < n ? factor_of<F>(*b(i, j)) : F{};
    }
}
// Pack b[k, n] as panels. panel: floats from one panel to the next.
template <class B, class Order = InOrder>
PV_SHARED void pack_columns(
    const B& b, int64_t k, int64_t n, float* panels, int64_t panel = COLUMN_PANEL, const Order& order = {}) {
  using F = Factor<typename B::Element>;
  constexpr int T = TERMS<F>;
  const int64_t whole = n / COLUMNS * COLUMNS;  // columns
  int64_t done = 0;                             // units
  if (b.column == 1) {
    done = k / T;
    const auto copy = [&](int64_t i, int64_t j) PV_INLINE {
      prefetch_unit<COLUMNS>(b((i + PREFETCH_UNITS) * T, j), b.row);
      copy_across(b(i * T, j), b.row, panels + j / COLUMNS * panel + order(i) * COLUMNS);
    };
    if constexpr (T == 1) {
      for (int64_t j = 0; j < whole; j += COLUMNS)
        for (int64_t i = 0; i < done; i++) copy(i, j);
    } else {  // lines have half the bytes: visit each once
      for (int64_t i = 0; i < done; i++)
        for (int64_t j = 0; j < whole; j += COLUMNS) copy(i, j);
    }
  } else if (b.row == 1) {  // transpose squares whose rows are columns of b
    done = k / T / COLUMN * COLUMN;
    for (int64_t j = 0; j < panels_of(n); j += COLUMN)
      for (int64_t i = 0; i < done; i += COLUMN) {
        ColumnReg r[COLUMN];
#pragma GCC unroll 16
        for (int t = 0; t < COLUMN; t++) r[t] = j + t < n ? read_along(b(i * T, j + t)) : ColumnReg{};
        transpose<COLUMN / 2, Column>(r);
        float* to = panels + j / COLUMNS * panel + j % COLUMNS;
#pragma GCC unroll 16
        for (int t = 0; t < COLUMN; t++) write_column(to + order(i + t) * COLUMNS, r[t]);
      }
  }
  if (whole < n && b.column == 1)
    pack_elements<F>(b.from(0, whole), 0, done * T, n - whole, panels + whole / COLUMNS * panel, panel, order);
  if (done * T < k) pack_elements<F>(b, done * T, k, n, panels, panel, order);
}

// Panels of ROWS rows, for matrices with contiguous columns: panel p has unit a[p * ROWS + i, j] at [p][j][i]. Each
// panel has space for DEPTH units of its rows and one more register.
constexpr int ROW_PANEL = ROWS * DEPTH + COLUMN;

template <class A>
PV_SHARED void pack_rows(const A& a, int64_t m, int64_t k, float* panels) {
  using E = typename A::Element;
  constexpr int T = TERMS<E>;
  constexpr int64_t GROUP = 8;  // units at a time, whose cache lines stay in the cache from panel to panel
  const int64_t whole = k / T;
  for (int64_t from = 0; from < units_of<E>(k); from += GROUP) {
    const int64_t to = least(from + GROUP, whole);
    const auto pack = [&](int64_t i, const auto& some) PV_INLINE {
      float* panel = panels + i / ROWS * ROW_PANEL;
      for (int64_t j = from; j < to; j++) {  // lanes past ROWS are overwritten by the next unit
        prefetch_unit<ROWS>(a(i, (j + PREFETCH_UNITS) * T), a.column);
        write_column(panel + j * ROWS, read_across(a(i, j * T), a.column, some));
      }
    };
    int64_t i = 0;
    for (; i + COLUMN <= m; i += ROWS) pack(i, All<COLUMN>());
    for (; i < m; i += ROWS) pack(i, Some<COLUMN>(m - i));
  }
  if (whole * T == k) return;
  for (int64_t i = 0; i < m; i++) {
    auto* unit = (Factor<E>*)(panels + i / ROWS * ROW_PANEL + whole * ROWS + i % ROWS);
    unit[0] = factor_of<Factor<E>>(*a(i, k - 1)), unit[1] = Factor<E>{};
  }
}

// Copy a[m, k] as rows of units, `step` units apart.
template <class E>
PV_SHARED void copy_rows(const Matrix<E>& a, int64_t m, int64_t k, float* rows, int64_t step = DEPTH) {
  constexpr int T = TERMS<E>;
  const int64_t whole = k / T / COLUMN * COLUMN;  // units
  int64_t i = 0;
  if (a.row == 1 && a.column != 1)  // transpose squares whose rows are columns of a
    for (; i + COLUMN <= m; i += COLUMN)
      for (int64_t j = 0; j < whole; j += COLUMN) {
        ColumnReg r[COLUMN];
#pragma GCC unroll 16
        for (int t = 0; t < COLUMN; t++) {
          prefetch_unit<COLUMN>(a(i, (j + t + PREFETCH_UNITS) * T), a.column);
          r[t] = read_across(a(i, (j + t) * T), a.column);
        }
        transpose<COLUMN / 2, Column>(r);
#pragma GCC unroll 16
        for (int t = 0; t < COLUMN; t++) write_column(rows + (i + t) * step + j, r[t]);
      }
  const int64_t across = i;  // rows of which `whole` units are done
  for (i = 0; i < m; i++, rows += step) {
    int64_t done = i < across ? whole : 0;
    if (a.column == 1)
      for (; done + COLUMN <= k / T; done += COLUMN) write_column(rows + done, read_along(a(i, done * T)));
    auto* to = (Factor<E>*)rows;
    for (int64_t j = done * T; j < units_of<E>(k) * T; j++)
      to[j] = j < k ? factor_of<Factor<E>>(*a(i, j)) : Factor<E>{};
  }
}

// ------------------------------------------------------------------------------------------------- dot products

// c[R, J] (+)= a[R, k] @ b[k, J], where the terms of both are contiguous. Prefetches every `turns`-th of the next J
// columns of b, from the `turn`-th on.
template <int R, int J, class E, class B>
[[gnu::noinline]] inline void dots(int64_t k, Matrix<E> a, Matrix<B> b, Sums c, int turn, int turns) {
  constexpr int STEP = TERMS<E> * COLUMN;
  ColumnReg sum[R][J] = {};
  int64_t t = 0;
  for (; t + STEP <= k; t += STEP) {
    for (int j = turn; j < J; j += turns) __builtin_prefetch(b(t, J + j), 0, 2);
    ColumnReg each[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) each[i] = read_along(a.at + t + i * a.row);
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) {
      const ColumnReg other = read_along(b.at + t + j * b.column);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) sum[i][j] = multiply_units<Factor<E>>(each[i], other, sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 8
    for (int j = 0; j < J; j++) {
      float all = total<Sum>(Column{{sum[i][j]}});
      for (int64_t rest = t; rest < k; rest++) all = __builtin_fmaf(load(a(i, rest)), load(b(rest, j)), all);
      float& to = c.at[i * c.step + j];
      to = c.more ? to + all : all;
    }
}

// `dots` for 2 to R rows, or 1 if R is 1.
template <int R, int J, class E, class B>
PV_FN void dot_group(int64_t rows, int64_t k, Matrix<E> a, Matrix<B> b, Sums c, int turn, int turns) {
  if (rows == R) dots<R, J>(k, a, b, c, turn, turns);
  else if constexpr (R > 2) dot_group<R - 1, J>(rows, k, a, b, c, turn, turns);
}
// `dots` for m rows in equal groups of at most MAX_ROWS, each of which prefetches its share of the next columns.
template <int MAX_ROWS, int J, class E, class B>
PV_FN void dot_rows(int64_t m, int64_t k, const Matrix<E>& a, const Matrix<B>& b, const Sums& c) {
  const int groups = int((m + MAX_ROWS - 1) / MAX_ROWS);
  int64_t i = 0;
  for (int group = 0; group < groups; group++) {
    const int64_t rows = (m - i + groups - group - 1) / (groups - group);
    dot_group<MAX_ROWS, J>(rows, k, a.from(i, 0), b, c.from(i, 0), group, groups);
    i += rows;
  }
}
// J columns share the reads of a, and stay in the cache until all rows have read them; the rest of n is computed one by
// one.
template <int MAX_ROWS, int J, class E, class B>
PV_FN void dot_columns(int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const Matrix<B>& b, const Sums& c) {
  int64_t j = 0;
  for (; j + J <= n; j += J) dot_rows<MAX_ROWS, J>(m, k, a, b.from(0, j), c.from(0, j));
  for (; j < n; j++) dot_rows<MAX_ROWS, 1>(m, k, a, b.from(0, j), c.from(0, j));
}
// c[m, n] (+)= a[m, k] @ b[k, n] by dot products. Groups of rows and columns are as large as fit in the registers.
template <class E, class B>
PV_SHARED void dot_block(
    int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const Matrix<B>& b, const Sums& c) {
  constexpr bool MANY = REGISTER == 64;  // 32 registers, not 16
  if (m == 1) return dot_columns<1, 8>(m, n, k, a, b, c);
  if (m == 2) return dot_columns<2, MANY ? 8 : 6>(m, n, k, a, b, c);
  if (n > FEW_COLUMNS) return dot_columns<MANY ? 4 : 3, MANY ? 5 : 4>(m, n, k, a, b, c);
  if (m == 3) return dot_columns<3, FEW_COLUMNS>(m, n, k, a, b, c);
  for (int64_t i = 0; i < m; i += 3) dot_block(least(3, m - i), n, k, a.from(i, 0), b, c.from(i, 0));
}

}  // namespace pv
