// Convolutions of several groups: the columns of a group depend on the channels of that group only.
//
// Rows are not gathered: for some adjacent pixels, a table has pointers to the channels of each tap, so padding, steps
// and dilation concern only the table. Registers have columns. If groups are large, a register has columns of one
// group, and a unit of a pixel's channels is broadcast to all lanes. If they are small, it has columns of several
// groups whose units also fit in one register, from which each lane selects its own.
namespace pv {

// Groups of OUT columns and IN channels of type E. TOGETHER: number of groups that share a register. An odd number of
// channels is not multiplied in pairs.
template <class E, int OUT, int IN, int TOGETHER> struct Groups {
  using F = std::conditional_t<IN % TERMS<E> == 0, Factor<E>, float>;
  static constexpr int UNITS = IN / TERMS<F>;
  static constexpr bool SHARED = TOGETHER > 1;
  // PERIOD: columns after which a new register begins. ROOM: columns that these take when packed: whole panels, unless
  // the columns fill registers.
  static constexpr int PERIOD = TOGETHER * OUT, CHANNELS = TOGETHER * IN;
  static constexpr int ROOM = PERIOD % COLUMN == 0 ? PERIOD : panels_of(PERIOD);
  static constexpr int64_t packed(int64_t column) { return column / PERIOD * ROOM + column % PERIOD; }

  // Registers of columns that share the reads of a pixel.
  static constexpr int REGISTERS = !SHARED && OUT % COLUMNS == 0 ? 2 : 1;
  // Adjacent taps that share the reads of a pixel, if pixels are spaced like taps: 1 if registers do not suffice.
  static constexpr int taps(int neighbours) { return REGISTER == 32 && REGISTERS == 2 ? 1 : neighbours; }
  // Pixels at a time: as many sums as fit in registers. Pixels that are far apart may share one set of the L1 cache.
  static constexpr int pixels(int line, int taps) {
    const int most = REGISTERS == 2 ? (REGISTER == 64 ? 7 : 5) : taps == 1 ? 7 : REGISTER == 64 ? 14 : 8;
    const int pieces = (line + most - 1) / most;
    return (line + pieces - 1) / pieces;
  }

  // Load a register of units, or n of them.
  template <class N> static PV_FN ColumnReg read(const E* at, const N& n) {
    if constexpr (TERMS<F> > 1) return load<float>((const float*)at, n).r[0];
    else return load(at, n).r[0];
  }
  // Broadcast one unit to all lanes.
  static PV_FN ColumnReg read_one(const E* at) {
    if constexpr (std::is_same_v<E, F>) return broadcast_unit(at);
    else return broadcast(load(at));
  }
  // Unit C of the group of each lane, from a register with the units of all groups.
  template <int C> static PV_FN ColumnReg pick(ColumnReg units) {
    return [&]<int... LANE>(std::integer_sequence<int, LANE...>) PV_INLINE {
      return __builtin_shufflevector(units, units, (LANE < PERIOD ? LANE / OUT * UNITS + C : 0)...);
    }(std::make_integer_sequence<int, COLUMN>());
  }
};

// c[P, registers of columns] = sums over taps of P pixels, for the first `rows` of them; += if `adds`. Tap t of pixel
// i, and tap t + u of pixel i - u, is at pointers[t * (P + T - 1) + i]. in, out: the active lanes of units, and of
// columns. Prefetches the weights of the next taps, or of the next panel, and the channels of the next register.
template <class G, int P, int T, class E, class In, class Out>
[[gnu::noinline, gnu::noipa]] inline void group_sums(
    int64_t taps, const E* const* pointers, int64_t channel, const float* weights, int64_t rows, const In& in,
    const Out& out, Sums c, bool adds) {
  using F = typename G::F;
  constexpr int R = G::REGISTERS, U = G::UNITS;
  ColumnReg sum[P][R] = {};
  const auto add = [&](int64_t unit, auto read) PV_INLINE {
    ColumnReg weight[T][R];
#pragma GCC unroll 8
    for (int u = 0; u < T; u++)
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) weight[u][r] = read_column(weights + (u * U + unit) * COLUMNS + r * COLUMN);
#pragma GCC unroll 8
    for (int u = 0; u < T; u++) pv::prefetch<COLUMNS>(weights + ((T + u) * U + unit) * COLUMNS);
#pragma GCC unroll 32
    for (int i = 0; i < P + T - 1; i++) {
      const ColumnReg each = read(pointers[i] + channel);
      if (unit % COLUMN == 0) __builtin_prefetch(pointers[i] + channel + unit * TERMS<F> + G::CHANNELS);
#pragma GCC unroll 8
      for (int u = 0; u < T; u++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
          if (i >= u && i - u < P) sum[i - u][r] = multiply_units<F>(each, weight[u][r], sum[i - u][r]);
    }
  };
  for (int64_t t = 0; t < taps; t++, pointers += P + T - 1, weights += T * U * COLUMNS) {
    if constexpr (G::SHARED) {
      [&]<int... C>(std::integer_sequence<int, C...>) PV_INLINE {
        (add(C, [&](const E* at) PV_INLINE { return G::template pick<C>(G::read(at, in)); }), ...);
      }(std::make_integer_sequence<int, U>());
    } else {
#pragma GCC unroll 2
      for (int64_t k = 0; k < U; k++) add(k, [&](const E* at) PV_INLINE { return G::read_one(at + k * TERMS<F>); });
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < P; i++)
#pragma GCC unroll 2
    for (int r = 0; r < R && i < rows; r++) {
      float* to = c.at + i * c.step + r * COLUMN;
      if (adds) sum[i][r] = load<float>(to, out).r[0] + sum[i][r];
      if constexpr (!std::is_same_v<Out, All<COLUMN>>) store<float>(to, Column{{sum[i][r]}}, out);
      else c.past ? stream_register(to, sum[i][r]) : write_column(to, sum[i][r]);
    }
}

// The table of pointers to the taps of P pixels, from pixel k of line (i, j) on, for `group_sums`; `zero_row` for those
// out of bounds.
template <int P, int T, class E>
PV_FN void find_pointers(const Window<E>& w, int64_t i, int64_t j, int64_t k, const E* zero_row, const E** pointers) {
  const int64_t last = least(P, w.rows[2].extent - k) + T - 1;
  for (int64_t t = 0; t < w.taps[0].extent; t++)
    for (int64_t u = 0; u < w.taps[1].extent; u += T) {
      const E* at = w.at + i * w.rows[0].step + j * w.rows[1].step + t * w.taps[0].step + u * w.taps[1].step;
      for (int64_t p = k; p < k + P + T - 1; p++)
        *pointers++ = p < k + last && is_in_bounds(w.edges, i, j, p, t, u) ? at + p * w.rows[2].step : zero_row;
    }
}

// Like `contract_groups`, term by term and only those in bounds: for weights that are not finite.
template <class G, int OUT, int IN, class E>
[[gnu::noinline, gnu::noipa]] inline void groups_each(
    int64_t n, int64_t from, const Window<E>& a, const Panels& b, Sums c) {
  using F = typename G::F;
  constexpr int TERM = TERMS<F>;
  const auto weight = [&](int64_t tap, int64_t e, int64_t column) PV_INLINE {
    return load((const F*)b(tap * G::UNITS + e / TERM, G::packed(column)) + e % TERM);
  };
  const int64_t area = a.area(), width = a.taps[1].extent;
  int64_t row = 0;
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++)
      for (int64_t k = 0; k < a.rows[2].extent; k++, row++)
        for (int64_t column = 0; column < n; column++) {
          float sum = 0;
          for (int64_t t = 0; t < area; t++) {
            const int64_t y = t / width, x = t % width;
            const E* at = a.at + i * a.rows[0].step + j * a.rows[1].step + k * a.rows[2].step +
                              y * a.taps[0].step + x * a.taps[1].step + (from + column) / OUT * IN;
            for (int64_t e = 0; e < IN && is_in_bounds(a.edges, i, j, k, y, x); e++)
              sum = __builtin_fmaf(load(at + e), weight(t, e, column), sum);
          }
          c.at[row * c.step + column] = sum;
        }
}

// Pack the columns of b[k, n] as panels, with the registers of `G`, and terms tap by tap.
template <class G, int64_t AREA, class E>
PV_FN void pack_groups(const Matrix<E>& b, int64_t n, bool planes, float* to) {
  using F = typename G::F;
  constexpr int64_t STEP = G::PERIOD == G::ROOM ? int64_t(1) << 40 : G::PERIOD;  // columns without a gap
  constexpr int64_t UNITS = AREA * G::UNITS, K = UNITS * TERMS<F>, PANEL = COLUMNS * UNITS;
  const auto by_tap = [](int64_t i) { return i % AREA * G::UNITS + i / AREA; };
  for (int64_t j = 0; j < n; j += STEP) {
    const Matrix<E> some = b.from(0, j);
    const int64_t columns = least(STEP, n - j);
    float* next = to + G::packed(j) * UNITS;
    if constexpr (!std::is_same_v<F, Factor<E>>) pack_elements<F>(some, 0, K, columns, next, PANEL, InOrder());
    else if (planes) pack_columns(some, K, columns, next, PANEL, by_tap);
    else pack_columns(some, K, columns, next, PANEL);
  }
}

// Pack the N columns of b before the program runs: like `pack_panels`, but with the registers and gaps of `G`.
template <class G, int64_t N, int64_t AREA, int64_t SIZE, class E>
inline void pack_all_groups(int64_t area, const Matrix<E>& b, float* to) {
  static_assert(SIZE == panels_of(G::packed(N)) * AREA * G::UNITS + 1);
  pack_groups<G, AREA>(b, N, area > 1, to);
  to[SIZE - 1] = all_finite<typename G::F>(to, SIZE - 1);
}

// c[rows of a, n]: the columns from `from` on of a convolution of COUNT groups, each with OUT columns and IN channels,
// and AREA taps. NEIGHBOURS: adjacent taps that are spaced like pixels. PIXELS: the maximum per line. N: the maximum of
// n.
template <int N, int COUNT, int OUT, int IN, int TOGETHER, int AREA, int NEIGHBOURS, int PIXELS, class E, class Right>
inline void contract_groups(int64_t n, int64_t from, const Window<E>& a, const Right& b, const Sums& c) {
  using G = Groups<E, OUT, IN, TOGETHER>;
  constexpr int K = AREA * G::UNITS, T = G::taps(NEIGHBOURS), P = G::pixels(PIXELS, T), R = G::REGISTERS;
  constexpr int64_t ROOM = panels_of(G::packed(N)) * K;
  alignas(64) float columns[is_packed<Right> ? 1 : ROOM];
  alignas(64) static constexpr E zero_row[COUNT * IN + COLUMN * TERMS<E>] = {};
  Panels panels;
  if constexpr (is_packed<Right>) {
    panels = b;
  } else {
    pack_groups<G, AREA>(b, n, a.planes, columns);
    panels = {columns, K, !a.padded || a.zeros || all_finite<typename G::F>(columns, panels_of(G::packed(n)) * K)};
  }
  if (a.padded && !a.zeros && !panels.finite) return groups_each<G, OUT, IN>(n, from, a, panels, c);
  const E* pointers[AREA / T * (P + T - 1)];
  // Taps per partial sum, see `contract.h`: most windows have no more units.
  constexpr int64_t MAX_TAPS = 4 * DEPTH / (T * G::UNITS), SOME = MAX_TAPS > 0 ? MAX_TAPS : 1;
  int64_t row = 0;
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++)
      for (int64_t k = 0; k < a.rows[2].extent; k += P) {
        const int64_t rows = least(P, a.rows[2].extent - k);
        find_pointers<P, T>(a, i, j, k, zero_row, pointers);
        for (int64_t first = 0; first < n; first += G::PERIOD)
          for (int64_t column = first; column < least(n, first + G::PERIOD); column += R * COLUMN) {
            const int64_t group = (from + column) / OUT;
            const auto sums = [&](const auto& in, const auto& out) PV_INLINE {
              const float* weights = panels(0, G::packed(column));
              for (int64_t t = 0; t < AREA / T; t += SOME)
                group_sums<G, P, T>(least(SOME, AREA / T - t), pointers + t * (P + T - 1), group * IN,
                                    weights + t * T * G::UNITS * COLUMNS, rows, in, out, c.from(row, column), t > 0);
            };
            constexpr bool whole = G::PERIOD % COLUMN == 0 && COUNT % TOGETHER == 0;
            constexpr bool all_read = !G::SHARED || (whole && TOGETHER * G::UNITS == COLUMN);
            const int64_t used = least(COLUMN, least(n, first + G::PERIOD) - column);
            if constexpr (whole && all_read) sums(All<COLUMN>(), All<COLUMN>());
            else if constexpr (!all_read)
              sums(Some<COLUMN>(least(TOGETHER, COUNT - group) * G::UNITS), Some<COLUMN>(used));
            else if (used == COLUMN) sums(All<COLUMN>(), All<COLUMN>());
            else sums(All<COLUMN>(), Some<COLUMN>(used));
          }
        row += rows;
      }
}

}  // namespace pv
