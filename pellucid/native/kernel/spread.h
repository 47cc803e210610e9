// Convolutions of images with few channels, in f32: each value of the image is spread to all columns.
//
// Windows are read as they lie: side by side or plane by plane, a term is a place. Where all taps of a line count that do
// anywhere in it, pixels share the reads of weights; at its ends each pixel has terms of its own.
namespace pv {

// Terms of a window that count: their numbers, and where their elements lie, counted from the first one's.
struct Terms {
  int count = 0;
  int16_t term[DEPTH];
  int64_t place[DEPTH];
  PV_FN void add(int64_t number, int64_t at) {
    term[count] = int16_t(number);
    place[count++] = at;
  }
};

// c[P, R registers from column j on] = sums over terms of windows of P neighbours, `step` apart.
template <int P, int R>
[[gnu::noinline, gnu::noipa]] inline void spread_sums(
    const Terms& terms, const float* at, int64_t step, const Panels& b, int64_t j, Sums c) {
  ColumnReg sum[P][R] = {};
  for (int t = 0; t < terms.count; t++) {
    const float* x = at + terms.place[t];
    ColumnReg weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) weight[r] = read_column(b(terms.term[t], j + r * COLUMN));
#pragma GCC unroll 12
    for (int i = 0; i < P; i++) {
      const ColumnReg each = spread(x[i * step]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[i][r] = multiply_add(each, weight[r], sum[i][r]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < P; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) write_column(c.at + i * c.step + j + r * COLUMN, sum[i][r]);
}

// c[P, n] from column j on: as many registers at a time as hide how long an addition takes.
template <int P, int R = P >= 4 ? 2 : P >= 2 ? 4 : 8>
PV_FN void spread_columns(
    int64_t n, const Terms& terms, const float* at, int64_t step, const Panels& b, const Sums& c, int64_t j = 0) {
  for (; j + (R - 1) * COLUMN < n; j += R * COLUMN) spread_sums<P, R>(terms, at, step, b, j, c);
  if constexpr (R > 1) spread_columns<P, R / 2>(n, terms, at, step, b, c, j);
}
template <int P = ROWS>
PV_SHARED void spread_pixels(
    int64_t pixels, int64_t n, const Terms& terms, const float* at, int64_t step, const Panels& b, const Sums& c) {
  if (pixels >= P) return spread_columns<P>(n, terms, at, step, b, c);
  if constexpr (P > 1) spread_pixels<P - 1>(pixels, n, terms, at, step, b, c);
}

// The pixels of line (i, j) for which a tap counts.
template <class E> PV_FN Span span_of(const Window<E>& w, int64_t i, int64_t j, int64_t t, int64_t u) {
  Span span{0, w.rows[2].extent};
  for (const Edge& edge : w.edges) {
    const int64_t first = edge.first + i * edge.rows[0] + j * edge.rows[1] + t * edge.taps[0] + u * edge.taps[1];
    span.keep(reached(edge.extent, first, edge.rows[2], w.rows[2].extent));
  }
  return span;
}

// c[M, n] = sum over the k terms of a's windows of the term times b[k, n]. N: the most of n; columns from n on, up to a
// whole register, are overwritten.
template <int N, class Right>
inline void contract_spread(int64_t n, int64_t k, const Window<float>& a, const Right& b, Sums c) {
  alignas(64) float columns[is_packed<Right> ? COLUMNS : N * DEPTH];
  Panels panels;
  if constexpr (is_packed<Right>) {
    panels = b;
  } else {
    pack_taps(b, k, n, a.planes ? a.channels : 1, columns);
    panels = {columns, DEPTH, !a.zeros || finite<float>(k, n, columns)};
  }
  const bool every = a.zeros && !panels.finite;  // then zeros make NaN
  static constexpr float nothing = 0;
  const int64_t width = a.taps[1].extent, area = a.area(), pixels = a.rows[2].extent, step = a.rows[2].step;
  // All channels of a tap; the first lies at `at`, the others `apart` from one another.
  const auto add = [&](Terms& terms, int64_t tap, int64_t at, int64_t apart) PV_INLINE {
    for (int64_t each = 0; each < a.channels; each++) terms.add(tap * a.channels + each, at + each * apart);
  };
  const auto place = [&](int64_t tap) PV_INLINE { return tap / width * a.taps[0].step + tap % width * a.taps[1].step; };
  Span spans[DEPTH];
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++, c = c.from(pixels, 0)) {
      const float* line = a.at + i * a.rows[0].step + j * a.rows[1].step;
      Terms terms;
      Span inside{0, pixels};
      for (int64_t tap = 0; tap < area; tap++) {
        spans[tap] = span_of(a, i, j, tap / width, tap % width);
        const bool nowhere = spans[tap].first >= spans[tap].last;
        if (!nowhere) add(terms, tap, place(tap), a.apart);
        if (!nowhere || every) inside.keep(spans[tap]);
      }
      const auto alone = [&](int64_t l) PV_INLINE {
        const float* pixel = line + l * step;
        Terms own;
        for (int64_t tap = 0; tap < area; tap++) {
          const bool counts = spans[tap].first <= l && l < spans[tap].last;
          if (counts) add(own, tap, place(tap), a.apart);
          else if (every) add(own, tap, &nothing - pixel, 0);
        }
        spread_pixels(1, n, own, pixel, 0, panels, c.from(l, 0));
      };
      const int64_t shared = inside.last - inside.first;
      const int64_t pieces = shared > 0 ? (shared + ROWS - 1) / ROWS : 0;
      for (int64_t l = 0; l < (pieces ? inside.first : pixels); l++) alone(l);
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t from = inside.first + piece * shared / pieces, to = inside.first + (piece + 1) * shared / pieces;
        spread_pixels(to - from, n, terms, line + from * step, step, panels, c.from(from, 0));
      }
      for (int64_t l = pieces ? inside.last : pixels; l < pixels; l++) alone(l);
    }
}

}  // namespace pv
