// Convolutions of images with few channels, in f32: each value of the image is broadcast to all columns.
//
// Windows are read in place: a term is an offset, whether channels are contiguous or in planes. Where all taps that are
// in bounds anywhere in a line are in bounds, pixels share the reads of weights; at its ends each pixel has its own
// terms.
namespace pv {

// The terms of a window that are in bounds: their indices, and the offsets of their elements from the pixel.
struct Terms {
  int count = 0;
  int16_t term[DEPTH];
  int64_t offset[DEPTH];
  PV_FN void add(int64_t number, int64_t at) {
    term[count] = int16_t(number);
    offset[count++] = at;
  }
};

// c[P, R registers from column j on] = sums over terms of the windows of P adjacent pixels, `step` elements apart.
template <int P, int R>
[[gnu::noinline, gnu::noipa]] inline void spread_sums(
    const Terms& terms, const float* at, int64_t step, const Panels& b, int64_t j, Sums c) {
  ColumnReg sum[P][R] = {};
  for (int t = 0; t < terms.count; t++) {
    const float* x = at + terms.offset[t];
    ColumnReg weight[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) weight[r] = read_column(b(terms.term[t], j + r * COLUMN));
#pragma GCC unroll 12
    for (int i = 0; i < P; i++) {
      const ColumnReg each = broadcast(x[i * step]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sum[i][r] = multiply_add(each, weight[r], sum[i][r]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < P; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) write_column(c.at + i * c.step + j + r * COLUMN, sum[i][r]);
}

// c[P, n] from column j on, with enough registers at a time to hide the latency of an addition.
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

// The pixels of line (i, j) for which tap (t, u) is in bounds.
template <class E> PV_FN Span span_of(const Window<E>& w, int64_t i, int64_t j, int64_t t, int64_t u) {
  Span span{0, w.rows[2].extent};
  for (const Edge& edge : w.edges) {
    const int64_t first = edge.first + i * edge.rows[0] + j * edge.rows[1] + t * edge.taps[0] + u * edge.taps[1];
    span.intersect(span_in_bounds(edge.extent, first, edge.rows[2], w.rows[2].extent));
  }
  return span;
}

// c[m, n] = sum over the k terms of a's windows of the term times b[k, n]. N: the maximum of n. Columns from n on, up
// to a whole register, are overwritten.
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
  const bool every = a.zeros && !panels.finite;  // zero times the weight may be NaN
  static constexpr float zero = 0;
  const int64_t width = a.taps[1].extent, area = a.area(), pixels = a.rows[2].extent, step = a.rows[2].step;
  // Add all channels of a tap, from offset `at` on, `channel_step` elements apart.
  const auto add = [&](Terms& terms, int64_t tap, int64_t at, int64_t channel_step) PV_INLINE {
    for (int64_t each = 0; each < a.channels; each++) terms.add(tap * a.channels + each, at + each * channel_step);
  };
  const auto offset = [&](int64_t tap) PV_INLINE {
    return tap / width * a.taps[0].step + tap % width * a.taps[1].step;
  };
  Span spans[DEPTH];
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++, c = c.from(pixels, 0)) {
      const float* line = a.at + i * a.rows[0].step + j * a.rows[1].step;
      Terms terms;
      Span inside{0, pixels};
      for (int64_t tap = 0; tap < area; tap++) {
        spans[tap] = span_of(a, i, j, tap / width, tap % width);
        const bool nowhere = spans[tap].first >= spans[tap].last;
        if (!nowhere) add(terms, tap, offset(tap), a.channel_step);
        if (!nowhere || every) inside.intersect(spans[tap]);
      }
      const auto alone = [&](int64_t l) PV_INLINE {
        const float* pixel = line + l * step;
        Terms own;
        for (int64_t tap = 0; tap < area; tap++) {
          const bool in_bounds = spans[tap].first <= l && l < spans[tap].last;
          if (in_bounds) add(own, tap, offset(tap), a.channel_step);
          else if (every) add(own, tap, &zero - pixel, 0);
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
