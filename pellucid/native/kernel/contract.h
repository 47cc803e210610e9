// Blocks of matrix products, for kernels whose sum of products is a contraction.
//
// `contract` computes a block of c = a @ b, a few hundred rows and some dozens of columns, in memory that the caller
// chooses. It processes DEPTH units of terms at a time, so that what is read repeatedly stays in a cache: it packs
// these rows of b (with few rows of a that does not pay, and b is read in place), and the micro-kernel adds up the
// terms with ROWS x COLUMNS sums in registers. Rows of a are read in place if their terms are units in memory, else
// they are packed. Packed operands live until the call returns. If the terms are contiguous in both operands, few rows,
// or columns, are computed as dot products. A right operand that was packed as a whole, before the program ran, is
// passed as `Panels`.
//
// Each sum adds DEPTH units in order, and then these partial sums in order.
namespace pv {

// Pack all of b[k, n] as panels, followed by one more element: 1 if all of b is finite, else 0. Terms that b stores
// channel by channel, `area` taps of each, are packed tap by tap. SIZE: number of floats of `to`. F: the type of terms
// of units.
template <int64_t N, int64_t K, int64_t SIZE, class F, class E>
inline void pack_panels(int64_t area, const Matrix<E>& b, float* to) {
  constexpr int T = TERMS<F>;
  constexpr int64_t n = N, k = K, columns = panels_of(N), units = units_of<F>(K);
  static_assert(SIZE == columns * units + 1);
  const int64_t channels = k / area;
  bool finite = true;
  auto* next = (F*)to;
  for (int64_t first = 0; first < columns; first += COLUMNS)
    for (int64_t unit = 0; unit < units; unit++)
      for (int64_t j = first; j < first + COLUMNS; j++)
        for (int64_t t = unit * T; t < (unit + 1) * T; t++) {
          const E* at = t < k && j < n ? b(t % channels * area + t / channels, j) : nullptr;
          finite &= !at || __builtin_isfinite(load(at));
          if constexpr (T == 1) *next++ = at ? load(at) : 0.0f;
          else *next++ = at ? factor_of<F>(*at) : F{};
        }
  to[SIZE - 1] = finite;
}
// The columns from `first` on, a multiple of COLUMNS, of the panels that `pack_panels` wrote for b[k, n].
template <class F, class E> PV_FN Panels panels_from(const E* panels, int64_t n, int64_t k, int64_t first) {
  const int64_t units = units_of<F>(k);
  const auto* packed = (const float*)panels;
  return {packed + first * units, units, packed[panels_of(n) * units] != 0};
}

// How the rows of a left operand are read: in place, copied as rows, or packed as panels.
enum class Left { IN_PLACE, ROWS, PANELS };
template <class E> PV_FN Left left_of(const Matrix<E>& a, int64_t m, int64_t k) {
  if (m > FEW_ROWS && a.row == 1 && a.column != 1) return BY_AMX<E> ? Left::ROWS : Left::PANELS;
  if (m > FEW_ROWS && a.column == 1 && a.row * int64_t(sizeof(E)) % SAME_SET == 0) return Left::ROWS;
  return has_units(a, k) ? Left::IN_PLACE : Left::ROWS;
}

// Steps of `Prefetcher` while m rows of a panel of k units are computed.
template <class F> PV_FN int64_t steps_of(int64_t m, int64_t k) {
  if constexpr (BY_AMX<F>) return (m + AMX_ROWS - 1) / AMX_ROWS * ((k + AMX_TILE - 1) / AMX_TILE) * AMX_LOADS;
  else return (m + ROWS - 1) / ROWS * k;
}
// The maximum of bytes to prefetch per step: more would delay the loads of the product. Panels are contiguous, so that
// the hardware prefetches them too; b in place is not.
template <class F> constexpr int64_t MAX_PREFETCH_PANELS = BY_AMX<F> ? 8 * LINE : INT64_MAX;
template <class F> constexpr int64_t MAX_PREFETCH_UNPACKED = BY_AMX<F> ? 8 * LINE : LINE / 2;

// The prefetcher for the time in which m rows of the panel of column j are computed with k units from `unit` on, of n
// columns and `all` units. What is read next are the same units of the next columns, else the next units of the first
// columns, else the next block.
template <class F>
PV_FN Prefetcher prefetcher_for(
    const Panels& b, int64_t unit, int64_t k, int64_t all, int64_t j, int64_t n, int64_t m) {
  const bool last = j + COLUMNS >= n, whole = unit + k >= all;
  const int64_t from = !last ? unit : whole ? 0 : unit + k;
  const float* at = b(from, last && !whole ? 0 : j + COLUMNS);
  const int64_t bytes = least(DEPTH, all - from) * COLUMNS * int64_t(sizeof(float));
  return Prefetcher::over(at, bytes, 1, bytes, steps_of<F>(m, k), MAX_PREFETCH_PANELS<F>);
}
// The prefetcher of `terms` x `columns` elements of a matrix in place, or of one of `shares` equal shares of its lines.
template <class E>
PV_FN Prefetcher prefetcher_for(const Matrix<E>& next, int64_t terms, int64_t columns, int64_t steps, int64_t share = 0,
                     int64_t shares = 1) {
  const bool along = next.row == 1;
  if (!along && next.column != 1) return {};
  const int64_t lines = along ? columns : terms, from = lines * share / shares;
  return Prefetcher::over(along ? next(0, from) : next(from, 0), (along ? terms : columns) * int64_t(sizeof(E)),
                     lines * (share + 1) / shares - from, (along ? next.column : next.row) * int64_t(sizeof(E)), steps,
                     MAX_PREFETCH_UNPACKED<Factor<E>>);
}
// The prefetcher for the time in which m rows of the panel of column j of b[k, n] are computed, with `depth` terms from
// t on. Columns are packed `wide` at a time, and each of their panels prefetches its share of what is packed next: the
// same terms of the next columns, else the next terms of the first columns, else the next block, unless that has the
// same columns.
template <bool SAME_COLUMNS, class E>
PV_FN Prefetcher prefetcher_for(
    const Matrix<E>& b, int64_t t, int64_t depth, int64_t k, int64_t j, int64_t n, int64_t m, int64_t wide = COLUMNS) {
  const int64_t first = j / wide * wide, panels = panels_of(least(wide, n - first)) / COLUMNS;
  const bool last = first + wide >= n, whole = t + depth >= k;
  if (SAME_COLUMNS && last && whole) return {};
  const int64_t terms = last && !whole ? least(depth, k - t - depth) : depth;
  const Matrix<E> next = !last ? b.from(t, first + wide) : whole ? b.from(0, n) : b.from(t + depth, 0);
  const int64_t steps = steps_of<Factor<E>>(m, units_of<E>(depth));
  return prefetcher_for(next, terms, least(wide, n), steps, (j - first) / COLUMNS, panels);
}

// Whether a block has all columns: then the next one reads the same ones.
template <int N, int WIDTH> constexpr bool in_one_block = WIDTH > 0 && WIDTH <= N;

// c = 0
PV_FN void clear(int64_t m, int64_t n, const Sums& c) {
  for (int64_t i = 0; i < m; i++) std::memset(c.at + i * c.step, 0, size_t(n) * sizeof(float));
}

// c[m, n] = a[m, k] @ b[k, n], where columns from n on, up to a multiple of COLUMNS, may be overwritten. M is the
// maximum of m and N, a multiple of COLUMNS, the maximum of n in all calls. WIDTH: see `panel`. B: Panels, or a Matrix
// of E or of a type that is cast to E.
template <int M, int N, int WIDTH, class E, class B>
inline void contract(int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const B& b, const Sums& c) {
  constexpr int T = TERMS<E>;
  using F = Factor<E>;
  static_assert(N % COLUMNS == 0);
  if (k <= 0) clear(m, n, c);
  if constexpr (!is_packed<B>)
    if ((m <= FEW_ROWS || n <= FEW_COLUMNS) && a.column == 1 && b.row == 1) {
      constexpr int64_t LONG = TERMS_AT_ONCE<E> * COLUMN;
      for (int64_t t = 0; t < k; t += LONG)
        dot_block(m, n, least(LONG, k - t), a.from(0, t), b.from(t, 0), c.after(t, LONG, k));
      return;
    }
  // A panel that is packed by itself is in the L1 cache when it is read. With AMX, which is faster, it pays more to
  // visit each line of b, which is in a page of its own, once for all panels.
  constexpr int64_t ACROSS = BY_AMX<F> ? N : COLUMNS;
  alignas(64) float columns[is_packed<B> ? COLUMNS : ACROSS * DEPTH];
  alignas(64) float rows[(M + ROWS - 1) / ROWS * ROW_PANEL];
  const Left left = left_of(a, m, k);
  BlockState state;
  for (int64_t t = 0; t < k; t += TERMS_AT_ONCE<E>) {
    const int64_t depth = least(TERMS_AT_ONCE<E>, k - t), units = units_of<E>(depth);
    const Sums sums = c.after(t, depth, k);
    if (left == Left::PANELS) pack_rows(a.from(0, t), m, depth, rows);
    if (left == Left::ROWS) copy_rows(a.from(0, t), m, depth, rows);
    LeftRows<F> left_rows = Matrix<F>{(const F*)rows, T * DEPTH, 1};
    if (left == Left::PANELS) left_rows = {{(const F*)rows, T, ROWS}, T * ROW_PANEL};
    if constexpr (is_factor<E>)
      if (left == Left::IN_PLACE) left_rows = a.from(0, t);
    const auto column = [&](int64_t j, const auto& right) PV_INLINE {
      panel<WIDTH>(state, m, n - j, units, left_rows, right, sums.from(0, j));
    };
    if constexpr (is_packed<B>) {
      for (int64_t j = 0; j < n; j += COLUMNS) {
        state.prefetcher = prefetcher_for<F>(b, t / T, units, units_of<E>(k), j, n, m);
        column(j, Rows{b(t / T, j), COLUMNS});
      }
    } else {
      using Other = typename B::Element;
      constexpr bool MAY_READ_IN_PLACE = std::is_same_v<Other, float> || M <= FEW_ROWS;
      const bool reads_in_place = m <= FEW_ROWS && b.column == 1 && k % T == 0;
      const int64_t in_place = reads_in_place && MAY_READ_IN_PLACE ? n / COLUMNS * COLUMNS : 0;
      for (int64_t j = 0; j < in_place; j += COLUMNS) {
        state.prefetcher = {b(t + PREFETCH_UNITS * T, j), b.row * T * int64_t(sizeof(Other))};
        if constexpr (MAY_READ_IN_PLACE) column(j, UnpackedRows<Other>{b(t, j), b.row});
      }
      const int64_t wide = b.column == 1 ? ACROSS : COLUMNS;
      for (int64_t first = in_place; first < n; first += wide) {
        pack_columns(b.from(t, first), depth, least(wide, n - first), columns);
        for (int64_t j = first; j < least(first + wide, n); j += COLUMNS) {
          if (in_place == 0) state.prefetcher = prefetcher_for<in_one_block<N, WIDTH>>(b, t, depth, k, j, n, m, wide);
          column(j, Rows{columns + (j - first) * DEPTH, COLUMNS});
        }
      }
    }
  }
}

}  // namespace pv
