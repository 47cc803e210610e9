// Gradients of the weights of depthwise convolutions, summed in f32: for each tap and channel a sum over pixels.
//
// A block is all taps of some channels. Line by line of the result's gradient, the taps of a window have their sums in
// registers: they share the reads of the gradient. What came out of a line is added to the block, so that each sum adds
// pixels line by line. Where not all taps of a line count, each has pixels of its own.
namespace pv {

// One register of channels of both operands, at the first pixel of a line and, of the image, at the first tap.
template <class E> struct TapLine {
  const E *image, *gradient;
  int64_t pixel, other;  // steps from pixel to pixel
  int64_t down, right;   // steps from tap to tap
};

// c[t, u] += sum over a line's pixels, for H x W taps of lines of `width`; spans: of each u.
template <int H, int W, class E, class N>
PV_FN void add_line(const TapLine<E>& line, const Span (&spans)[W], const N& n, int64_t width, Sums c) {
  ColumnReg sum[H][W] = {};
  const auto image = [&](int64_t k, int t, int u) PV_INLINE {
    return load(line.image + k * line.pixel + t * line.down + u * line.right, n).r[0];
  };
  const auto gradient = [&](int64_t k) PV_INLINE { return load(line.gradient + k * line.other, n).r[0]; };
  Span shared = spans[0];
#pragma GCC unroll 8
  for (int u = 1; u < W; u++) shared.keep(spans[u]);
  if (shared.last < shared.first) shared = {spans[0].first, spans[0].first};
  for (int64_t k = shared.first; k < shared.last; k++) {
    const ColumnReg each = gradient(k);
#pragma GCC unroll 4
    for (int t = 0; t < H; t++)
#pragma GCC unroll 8
      for (int u = 0; u < W; u++) sum[t][u] = multiply_add(each, image(k, t, u), sum[t][u]);
  }
#pragma GCC unroll 8
  for (int u = 0; u < W; u++) {
    const auto alone = [&](int64_t first, int64_t last) PV_INLINE {
      for (int64_t k = first; k < last; k++) {
        const ColumnReg each = gradient(k);
#pragma GCC unroll 4
        for (int t = 0; t < H; t++) sum[t][u] = multiply_add(each, image(k, t, u), sum[t][u]);
      }
    };
    alone(spans[u].first, least(shared.first, spans[u].last));
    alone(shared.last > spans[u].first ? shared.last : spans[u].first, spans[u].last);
  }
#pragma GCC unroll 4
  for (int t = 0; t < H; t++)
#pragma GCC unroll 8
    for (int u = 0; u < W; u++) {
      float* to = c.at + (t * width + u) * c.step;
      write_column(to, read_column(to) + sum[t][u]);
    }
}

// Taps of a line whose sums are in registers at the same time, and lines of them.
template <int WIDTH> constexpr int TAPS_AT_ONCE = WIDTH < 7 ? WIDTH : 7;
template <int HEIGHT, int W> constexpr int TAP_LINES = W <= 4 && HEIGHT >= 3 ? 3 : W <= 5 && HEIGHT >= 2 ? 2 : 1;

// The same for the taps of HEIGHT x WIDTH from column u on, of all lines of them that count for line j.
template <int HEIGHT, int WIDTH, int W, class E, class N>
[[gnu::noinline, gnu::noipa]] inline void add_taps(
    const Pixels& pixels, int64_t j, const TapLine<E>& line, int u, const N& n, const Sums& c) {
  constexpr int H = TAP_LINES<HEIGHT, W>;
  Span spans[W];
  for (int k = 0; k < W; k++) spans[k] = span_in_line(pixels, 0, u + k, 1, pixels.axes[2].extent);
  const auto from = [&](int t) PV_INLINE {
    TapLine<E> at = line;
    at.image += t * line.down + u * line.right;
    return at;
  };
  for (int t = 0; t < HEIGHT;) {
    int counted = 0;
    while (counted < H && t + counted < HEIGHT && line_counts(pixels, j, t + counted)) counted++;
    if (counted == H) add_line<H, W>(from(t), spans, n, WIDTH, c.from(t * WIDTH + u, 0));
    else if (counted > 0) add_line<1, W>(from(t), spans, n, WIDTH, c.from(t * WIDTH + u, 0));
    t += counted == H ? H : 1;
  }
}

// c[taps, n] = sum over pixels of the image, at the tap, times the gradient, channel by channel, for windows of HEIGHT x
// WIDTH taps that lie `down` and `right` apart. Columns from n on, up to a whole register, are overwritten.
template <int HEIGHT, int WIDTH, class E>
inline void contract_tap_gradients(
    int64_t n, const E* image, const E* gradient, const Pixels& pixels, int64_t down, int64_t right, const Sums& c) {
  const auto &images = pixels.axes[0], &lines = pixels.axes[1], &line = pixels.axes[2];
  const auto channels = [&](int64_t i, int64_t j, int64_t first, const auto& lanes) PV_INLINE {
    constexpr int W = TAPS_AT_ONCE<WIDTH>, REST = WIDTH % W;
    const TapLine<E> at{image + i * images.left + j * lines.left + first,
                        gradient + i * images.right + j * lines.right + first, line.left, line.right, down, right};
    for (int u = 0; u + W <= WIDTH; u += W) add_taps<HEIGHT, WIDTH, W>(pixels, j, at, u, lanes, c.from(0, first));
    if constexpr (REST > 0) add_taps<HEIGHT, WIDTH, REST>(pixels, j, at, WIDTH - REST, lanes, c.from(0, first));
  };
  clear(HEIGHT * WIDTH, (n + COLUMN - 1) / COLUMN * COLUMN, c);
  for (int64_t i = 0; i < images.extent; i++)
    for (int64_t j = 0; j < lines.extent; j++) {
      int64_t first = 0;
      for (; first + COLUMN <= n; first += COLUMN) channels(i, j, first, All<COLUMN>());
      if (first < n) channels(i, j, first, Some<COLUMN>(n - first));
    }
}

}  // namespace pv
