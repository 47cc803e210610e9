// Depthwise convolutions: each column is computed from one channel of the image.
//
// Registers have adjacent channels of some pixels of a line. If taps of a line are spaced like pixels, each value that
// is read from the image is used for all pixels whose windows have it. Values out of bounds are read from an array of
// zeros.
namespace pv {

// T taps in one line of the image, from tap `tap` on, for some adjacent pixels. at: their first element. Of the
// elements that these pixels read, [first, first + count) are in bounds.
template <class E> struct ReadLine {
  const E* at;
  int64_t tap, first, count;
  // The taps `elements` elements further on, where `all` elements are read.
  PV_FN ReadLine after(int64_t elements, int64_t step, int64_t all) const {
    const int64_t from = first > elements ? first - elements : 0, to = least(first + count - elements, all);
    return {at + elements * step, tap, from, to > from ? to - from : 0};
  }
};

// How a line of PIXELS pixels, of whose windows T taps share reads, is divided into registers.
template <int PIXELS, int T> struct Channels {
  static constexpr int REGISTERS = REGISTER == 64 ? 32 : 16;
  static constexpr int MAX_PIXELS = REGISTER == 64 ? 16 : T <= 5 ? 8 : 7;
  static constexpr int PIECES = (PIXELS + MAX_PIXELS - 1) / MAX_PIXELS;
  static constexpr int P = (PIXELS + PIECES - 1) / PIECES;
  // Registers of channels at a time: two, if one has too few sums to hide the latency of an addition.
  static constexpr int R = 2 * P <= MAX_PIXELS && 2 * (P + T + 1) <= REGISTERS ? 2 : 1;
};

// Number of elements of a line that T taps of P pixels read, with a stride of S.
template <int P, int T, int S> constexpr int READ = S * (P - 1) + T;

// c[P, R registers from column j on], of which the first `pixels` rows are written. INSIDE: all elements are in bounds.
template <int P, int R, int T, int S, bool INSIDE, class E, class N>
[[gnu::noinline, gnu::noipa]] inline void channel_sums(
    const ReadLine<E>* lines, int64_t count, int64_t step, const E* zero_row, const Panels& b, int64_t j, const N& n,
    int64_t pixels, Sums c) {
  ColumnReg sum[P][R] = {};
  for (const ReadLine<E>* line = lines; line < lines + count; line++) {
    ColumnReg weight[T][R];
#pragma GCC unroll 8
    for (int u = 0; u < T; u++)
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) weight[u][r] = read_column(b(line->tap + u, j + r * COLUMN));
    const E* next = line->at + j;
    const uint64_t first = uint64_t(line->first), inside = uint64_t(line->count);
#pragma GCC unroll 64
    for (int k = 0; k < READ<P, T, S>; k++, next += step) {
      const E* at = INSIDE || k - first < inside ? next : zero_row;
#pragma GCC unroll 2
      for (int r = 0; r < R; r++) {
        const ColumnReg each = load(at + r * COLUMN, n).r[0];
#pragma GCC unroll 8
        for (int u = 0; u < T; u++)
          if (k >= u && (k - u) % S == 0 && (k - u) / S < P)
            sum[(k - u) / S][r] = multiply_add(each, weight[u][r], sum[(k - u) / S][r]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < P; i++)
#pragma GCC unroll 2
    for (int r = 0; r < R && i < pixels; r++) write_column(c.at + i * c.step + j + r * COLUMN, sum[i][r]);
}

// `channel_sums` for n columns. WHOLE: n is a multiple of R registers.
template <bool WHOLE, int R, int P, int T, int S, bool INSIDE, class E>
PV_FN void line_sums(
    int64_t n, const ReadLine<E>* lines, int64_t count, int64_t step, const E* zero_row, const Panels& b,
    int64_t pixels, const Sums& c) {
  int64_t j = 0;
  for (; j + R * COLUMN <= n; j += R * COLUMN)
    channel_sums<P, R, T, S, INSIDE>(lines, count, step, zero_row, b, j, All<COLUMN>(), pixels, c);
  if constexpr (!WHOLE)
    for (; j < n; j += COLUMN)
      channel_sums<P, 1, T, S, INSIDE>(
          lines, count, step, zero_row, b, j, Some<COLUMN>(least(COLUMN, n - j)), pixels, c);
}

// Like `contract_channels`, term by term and only those in bounds: for weights that are not finite.
template <class E>
[[gnu::noinline, gnu::noipa]] inline void channels_each(
    int64_t n, int64_t k, const Window<E>& a, const Panels& b, const Sums& c) {
  clear(a.height(), n, c);
  for (int64_t tap = 0; tap < k; tap++)
    for_rows(a, run_at(a, tap, 1), 0, [&](int64_t row, const E* from, bool in_bounds, bool) {
      for (int64_t j = 0; in_bounds && j < n; j++)
        c.at[row * c.step + j] = __builtin_fmaf(load(from + j), *b(tap, j), c.at[row * c.step + j]);
    });
}

// The `all` elements of line (i, j) that tap (t, u) and the T - 1 taps after it read for all pixels. They are spaced
// like taps if T > 1, else like pixels.
template <int T, class E>
PV_FN ReadLine<E> tap_line(const Window<E>& w, int64_t i, int64_t j, int64_t t, int64_t u, int64_t all) {
  Span span{0, all};
  for (const Edge& edge : w.edges) {
    const int64_t first = edge.first + i * edge.rows[0] + j * edge.rows[1] + t * edge.taps[0] + u * edge.taps[1];
    span.intersect(span_in_bounds(edge.extent, first, T > 1 ? edge.taps[1] : edge.rows[2], all));
  }
  const E* at = w.at + i * w.rows[0].step + j * w.rows[1].step + t * w.taps[0].step + u * w.taps[1].step;
  return {at, t * w.taps[1].extent + u, span.first, span.last > span.first ? span.last - span.first : 0};
}

// c[m, n]: column j is the sum over the k taps of column j of a's windows times b[k, j]. N: the maximum of n. WIDTH:
// columns of all blocks together (0: unknown). PIXELS: the maximum per line. T taps of a line share reads: pixels are S
// times as far apart as taps; T is 1 if their spacing allows no such S.
template <int N, int WIDTH, int PIXELS, int T, int S, class E, class Right>
inline void contract_channels(int64_t n, int64_t k, const Window<E>& a, const Right& b, Sums c) {
  constexpr int P = Channels<PIXELS, T>::P, R = Channels<PIXELS, T>::R;
  constexpr bool WHOLE = WIDTH > 0 && WIDTH % (R * COLUMN) == 0 && N % (R * COLUMN) == 0;
  alignas(64) float columns[is_packed<Right> ? COLUMNS : N * DEPTH];
  Panels panels;
  if constexpr (is_packed<Right>) {
    panels = b;
  } else {
    pack_taps(b, k, n, 1, columns);
    panels = {columns, DEPTH, !a.padded || finite<float>(k, n, columns)};
  }
  if (a.padded && !a.zeros && !panels.finite) return channels_each(n, k, a, panels, c);
  const bool every = a.zeros && !panels.finite;  // zero times the weight may be NaN
  alignas(64) static constexpr E zero_row[N + COLUMNS] = {};
  const int64_t step = T > 1 ? a.taps[1].step : a.rows[2].step, pixels = a.rows[2].extent;
  ReadLine<E> whole[DEPTH / T], lines[DEPTH / T];
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++, c = c.from(pixels, 0)) {
      int64_t count = 0;
      for (int64_t t = 0; t < a.taps[0].extent; t++)
        for (int64_t u = 0; u < a.taps[1].extent; u += T) {
          whole[count] = tap_line<T>(a, i, j, t, u, S * (pixels - 1) + T);
          if (whole[count].count > 0 || every) count++;
        }
      for (int64_t l = 0; l < pixels; l += P) {
        bool inside = true;
        for (int64_t t = 0; t < count; t++) {
          lines[t] = whole[t].after(S * l, step, READ<P, T, S>);
          inside &= lines[t].count == READ<P, T, S>;
        }
        const int64_t some = least(P, pixels - l);
        if (inside) line_sums<WHOLE, R, P, T, S, true>(n, lines, count, step, zero_row, panels, some, c.from(l, 0));
        else line_sums<WHOLE, R, P, T, S, false>(n, lines, count, step, zero_row, panels, some, c.from(l, 0));
      }
    }
}

}  // namespace pv
