// Convolutions of several groups: the columns of a group are made of the channels of that group alone.
//
// Rows are not gathered: a table tells for some neighbouring pixels where the channels of each tap begin, so padding,
// steps and dilation are the table's alone. Registers hold columns. If groups are large, a register holds columns of
// one group, and a unit of a pixel's channels is spread to all lanes. If they are small, it holds columns of several
// groups whose units fit in one register, too: each lane picks its own from there.
namespace pv {

// Groups of OUT columns and IN channels of type E, TOGETHER of which share a register; 1: a group has registers of its
// own. An odd number of channels is not multiplied in pairs.
template <class E, int OUT, int IN, int TOGETHER> struct Groups {
  using F = std::conditional_t<IN % TERMS<E> == 0, Factor<E>, float>;
  static constexpr int UNITS = IN / TERMS<F>;
  static constexpr bool SHARED = TOGETHER > 1;
  // Columns after which registers begin anew, and how many columns these take when they are packed: whole panels,
  // unless the columns fill registers.
  static constexpr int PERIOD = TOGETHER * OUT, CHANNELS = TOGETHER * IN;
  static constexpr int ROOM = PERIOD % COLUMN == 0 ? PERIOD : panels_of(PERIOD);
  static constexpr int64_t packed(int64_t column) { return column / PERIOD * ROOM + column % PERIOD; }

  // Registers of columns that share the reads of a pixel.
  static constexpr int REGISTERS = !SHARED && OUT % COLUMNS == 0 ? 2 : 1;
  // Neighbouring taps that share the reads of a pixel, where windows move by as much: none if registers do not suffice.
  static constexpr int taps(int neighbours) { return REGISTER == 32 && REGISTERS == 2 ? 1 : neighbours; }
  // Pixels at a time: sums for all registers. Those that lie far apart may share one set of the first cache.
  static constexpr int pixels(int line, int taps) {
    const int most = REGISTERS == 2 ? (REGISTER == 64 ? 7 : 5) : taps == 1 ? 7 : REGISTER == 64 ? 14 : 8;
    const int pieces = (line + most - 1) / most;
    return (line + pieces - 1) / pieces;
  }

  // A register of units, or n of them; and one unit in all lanes.
  template <class N> static PV_FN ColumnReg read(const E* at, const N& n) {
    if constexpr (TERMS<F> > 1) return load<float>((const float*)at, n).r[0];
    else return load(at, n).r[0];
  }
  static PV_FN ColumnReg read_one(const E* at) {
    if constexpr (std::is_same_v<E, F>) return spread_unit(at);
    else return spread(load(at));
  }
  // For each lane, unit C of its group, of a register that holds the units of all.
  template <int C> static PV_FN ColumnReg pick(ColumnReg units) {
    return [&]<int... LANE>(std::integer_sequence<int, LANE...>) PV_INLINE {
      return __builtin_shufflevector(units, units, (LANE < PERIOD ? LANE / OUT * UNITS + C : 0)...);
    }(std::make_integer_sequence<int, COLUMN>());
  }
};

// c[P, registers of columns] = sums over taps of P pixels, for the first `rows` of them, added to what is there if asked.
// Tap t of pixel i, and tap t + u of pixel i - u, lies at places[t * (P + T - 1) + i]. in, out: the lanes in use of
// units, and of columns.
// Asked for ahead: the weights of the next taps, or of the next panel, and the channels of the next register.
template <class G, int P, int T, class E, class In, class Out>
[[gnu::noinline, gnu::noipa]] inline void group_sums(
    int64_t taps, const E* const* places, int64_t channel, const float* weights, int64_t rows, const In& in,
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
      const ColumnReg each = read(places[i] + channel);
      if (unit % COLUMN == 0) __builtin_prefetch(places[i] + channel + unit * TERMS<F> + G::CHANNELS);
#pragma GCC unroll 8
      for (int u = 0; u < T; u++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
          if (i >= u && i - u < P) sum[i - u][r] = multiply_units<F>(each, weight[u][r], sum[i - u][r]);
    }
  };
  for (int64_t t = 0; t < taps; t++, places += P + T - 1, weights += T * U * COLUMNS) {
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

// Where the taps of P pixels lie, from pixel k of line (i, j) on, as `group_sums` wants them; `nothing` is where those
// lie that do not count.
template <int P, int T, class E>
PV_FN void find_places(const Window<E>& w, int64_t i, int64_t j, int64_t k, const E* nothing, const E** places) {
  const int64_t last = least(P, w.rows[2].extent - k) + T - 1;
  for (int64_t t = 0; t < w.taps[0].extent; t++)
    for (int64_t u = 0; u < w.taps[1].extent; u += T) {
      const E* at = w.at + i * w.rows[0].step + j * w.rows[1].step + t * w.taps[0].step + u * w.taps[1].step;
      for (int64_t p = k; p < k + P + T - 1; p++)
        *places++ = p < k + last && counts_at(w.edges, i, j, p, t, u) ? at + p * w.rows[2].step : nothing;
    }
}

// The same sums, term by term and without what does not count: for weights that are not finite.
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
            for (int64_t e = 0; e < IN && counts_at(a.edges, i, j, k, y, x); e++)
              sum = __builtin_fmaf(load(at + e), weight(t, e, column), sum);
          }
          c.at[row * c.step + column] = sum;
        }
}

// The columns of b[k, n] as panels, registers as `G` has them, and terms tap by tap.
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

// The columns of b, N of them, packed before the program runs: as `pack_panels` does, but for registers and gaps.
template <class G, int64_t N, int64_t AREA, int64_t SIZE, class E>
inline void pack_all_groups(int64_t area, const Matrix<E>& b, float* to) {
  static_assert(SIZE == panels_of(G::packed(N)) * AREA * G::UNITS + 1);
  pack_groups<G, AREA>(b, N, area > 1, to);
  to[SIZE - 1] = all_finite<typename G::F>(to, SIZE - 1);
}

// c[rows of a, n]: the columns from `from` on of a convolution of COUNT groups, each with OUT columns and IN channels,
// and AREA taps, of which so many NEIGHBOURS lie as far apart as pixels. PIXELS: the most of a line. N: the most of n.
template <int N, int COUNT, int OUT, int IN, int TOGETHER, int AREA, int NEIGHBOURS, int PIXELS, class E, class Right>
inline void contract_groups(int64_t n, int64_t from, const Window<E>& a, const Right& b, const Sums& c) {
  using G = Groups<E, OUT, IN, TOGETHER>;
  constexpr int K = AREA * G::UNITS, T = G::taps(NEIGHBOURS), P = G::pixels(PIXELS, T), R = G::REGISTERS;
  constexpr int64_t ROOM = panels_of(G::packed(N)) * K;
  alignas(64) float columns[is_packed<Right> ? 1 : ROOM];
  alignas(64) static constexpr E nothing[COUNT * IN + COLUMN * TERMS<E>] = {};
  Panels panels;
  if constexpr (is_packed<Right>) {
    panels = b;
  } else {
    pack_groups<G, AREA>(b, n, a.planes, columns);
    panels = {columns, K, !a.padded || a.zeros || all_finite<typename G::F>(columns, panels_of(G::packed(n)) * K)};
  }
  if (a.padded && !a.zeros && !panels.finite) return groups_each<G, OUT, IN>(n, from, a, panels, c);
  const E* places[AREA / T * (P + T - 1)];
  // Taps that are summed in order, as in `contract.h`, before these partial sums are: most windows have no more units.
  constexpr int64_t MOST = 4 * DEPTH / (T * G::UNITS), SOME = MOST > 0 ? MOST : 1;
  int64_t row = 0;
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++)
      for (int64_t k = 0; k < a.rows[2].extent; k += P) {
        const int64_t rows = least(P, a.rows[2].extent - k);
        find_places<P, T>(a, i, j, k, nothing, places);
        for (int64_t first = 0; first < n; first += G::PERIOD)
          for (int64_t column = first; column < least(n, first + G::PERIOD); column += R * COLUMN) {
            const int64_t group = (from + column) / OUT;
            const auto sums = [&](const auto& in, const auto& out) PV_INLINE {
              const float* weights = panels(0, G::packed(column));
              for (int64_t t = 0; t < AREA / T; t += SOME)
                group_sums<G, P, T>(least(SOME, AREA / T - t), places + t * (P + T - 1), group * IN,
                                    weights + t * T * G::UNITS * COLUMNS, rows, in, out, c.from(row, column), t > 0);
            };
            constexpr bool whole = G::PERIOD % COLUMN == 0 && COUNT % TOGETHER == 0;
            constexpr bool all_read = !G::SHARED || (whole && TOGETHER * G::UNITS == COLUMN);
            const int64_t used = least(COLUMN, least(n, first + G::PERIOD) - column);
            if constexpr (whole && all_read) sums(All<COLUMN>(), All<COLUMN>());
            else if constexpr (!all_read) sums(Some<COLUMN>(least(TOGETHER, COUNT - group) * G::UNITS), Some<COLUMN>(used));
            else if (used == COLUMN) sums(All<COLUMN>(), All<COLUMN>());
            else sums(All<COLUMN>(), Some<COLUMN>(used));
          }
        row += rows;
      }
}

}  // namespace pv
