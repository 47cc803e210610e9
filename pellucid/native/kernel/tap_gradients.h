// Gradients of the weights of convolutions of several groups, including depthwise ones, summed in f32: for each tap,
// channel and output of a group a sum over pixels.
//
// A block has all taps of some outputs, whose gradients fill registers; each lane has a channel of its group. For some
// lines of the result's gradient, the sums of several taps are in registers and share the reads of the gradient; then
// they are added to the block. At the ends of a line, where not all taps are in bounds, each tap has its own range of
// pixels.
namespace pv {

// One register of both operands, at the first pixel of a line and, of the image, at the first tap. Either `count`
// successive lines for which all taps are in bounds, or one line. piece: the pixels of the lines to add.
template <class E> struct TapLines {
  const E *image, *gradient;
  const Pixels& pixels;
  int64_t down, right;  // steps from tap to tap
  int64_t first, count;
  Span piece;
  PV_FN const TermAxis& lines() const { return pixels.axes[1]; }
  PV_FN const TermAxis& line() const { return pixels.axes[2]; }
};

// c[t, u] += sum over the pixels of lines, for H x W taps, of `width` per line. spans: the pixels of each u. n: the
// active lanes. read: loads these lanes of the image. image: the first tap.
template <int H, int W, class E, class N, class Read>
PV_FN void add_lines(const TapLines<E>& lines, const E* image, const Span (&spans)[W], const N& n, const Read& read,
                     int64_t width, Sums c) {
  ColumnReg sum[H][W] = {};
  Span shared = spans[0];
#pragma GCC unroll 8
  for (int u = 1; u < W; u++) shared.intersect(spans[u]);
  if (shared.last < shared.first) shared = {spans[0].first, spans[0].first};
  for (int64_t l = 0; l < lines.count; l++) {
    const E *first = image + l * lines.lines().left, *gradients = lines.gradient + l * lines.lines().right;
    const auto at = [&](int64_t k, int t, int u) PV_INLINE {
      return read(first + k * lines.line().left + t * lines.down + u * lines.right);
    };
    const auto gradient = [&](int64_t k) PV_INLINE { return load(gradients + k * lines.line().right, n).r[0]; };
    for (int64_t k = shared.first; k < shared.last; k++) {
      const ColumnReg each = gradient(k);
#pragma GCC unroll 4
      for (int t = 0; t < H; t++)
#pragma GCC unroll 8
        for (int u = 0; u < W; u++) sum[t][u] = multiply_add(each, at(k, t, u), sum[t][u]);
    }
#pragma GCC unroll 8
    for (int u = 0; u < W; u++) {
      const auto alone = [&](int64_t from, int64_t to) PV_INLINE {
        for (int64_t k = from; k < to; k++) {
          const ColumnReg each = gradient(k);
#pragma GCC unroll 4
          for (int t = 0; t < H; t++) sum[t][u] = multiply_add(each, at(k, t, u), sum[t][u]);
        }
      };
      alone(spans[u].first, least(shared.first, spans[u].last));
      alone(shared.last > spans[u].first ? shared.last : spans[u].first, spans[u].last);
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < H; t++)
#pragma GCC unroll 8
    for (int u = 0; u < W; u++) {
      float* to = c.at + (t * width + u) * c.step;
      store<float>(to, Column{{load<float>(to, n).r[0] + sum[t][u]}}, n);
    }
}

// Taps of a line whose sums are in registers at the same time, and lines of taps.
template <int WIDTH> constexpr int TAPS_AT_ONCE = WIDTH < 7 ? WIDTH : 7;
template <int HEIGHT, int W> constexpr int TAP_LINES = W <= 4 && HEIGHT >= 3 ? 3 : W <= 5 && HEIGHT >= 2 ? 2 : 1;

// `add_lines` for W of HEIGHT x WIDTH taps per line, from column u on, for all lines of taps that are in bounds, and
// for all channels. channels: calls its argument with the index of each channel, its offset in elements, and how to
// read it.
template <int HEIGHT, int WIDTH, int W, class E, class N, class Channels>
[[gnu::noinline, gnu::noipa]] inline void add_tap_columns(
    const TapLines<E>& lines, int u, const N& n, const Channels& channels, const Sums& c) {
  constexpr int H = TAP_LINES<HEIGHT, W>;
  Span spans[W];
  for (int k = 0; k < W; k++) {
    spans[k] = span_in_line(lines.pixels, 0, u + k, 1, lines.line().extent);
    spans[k].intersect(lines.piece);
  }
  for (int t = 0; t < HEIGHT;) {
    int counted = 0;
    while (counted < H && t + counted < HEIGHT && line_in_bounds(lines.pixels, lines.first, t + counted)) counted++;
    channels([&](int64_t channel, int64_t further, const auto& read) PV_INLINE {
      const E* image = lines.image + t * lines.down + u * lines.right + further;
      const Sums sums = c.from(channel * HEIGHT * WIDTH + t * WIDTH + u, 0);
      if (counted == H) add_lines<H, W>(lines, image, spans, n, read, WIDTH, sums);
      else if (counted > 0) add_lines<1, W>(lines, image, spans, n, read, WIDTH, sums);
    });
    t += counted == H ? H : 1;
  }
}
// `add_lines` for all taps and channels.
template <int HEIGHT, int WIDTH, class E, class N, class Channels>
PV_FN void add_taps(const TapLines<E>& lines, const N& n, const Channels& channels, const Sums& c) {
  constexpr int W = TAPS_AT_ONCE<WIDTH>, REST = WIDTH % W;
  for (int u = 0; u + W <= WIDTH; u += W) add_tap_columns<HEIGHT, WIDTH, W>(lines, u, n, channels, c);
  if constexpr (REST > 0) add_tap_columns<HEIGHT, WIDTH, REST>(lines, WIDTH - REST, n, channels, c);
}

// Maximum number of pixels per sum in registers, of several lines and of one line: larger sums would lose precision.
constexpr int64_t MAX_PIXELS = 64, MAX_LINE_PIXELS = 512;

// Number of lines from line j on that are processed together.
template <int HEIGHT> PV_FN int64_t lines_from(const Pixels& pixels, int64_t j) {
  const auto whole = [&](int64_t line) PV_INLINE {
    int64_t counted = 0;
    while (counted < HEIGHT && line_in_bounds(pixels, line, counted)) counted++;
    return counted == HEIGHT;
  };
  int64_t count = 1;
  if (!whole(j)) return count;
  while (j + count < pixels.axes[1].extent && (count + 1) * pixels.axes[2].extent <= MAX_PIXELS && whole(j + count))
    count++;
  return count;
}

// Calls each(lines, first column, lanes) for all lines of pixels, or pieces of long lines, and for all registers of n
// columns.
template <int HEIGHT, class E, class Each>
PV_FN void for_lines(
    int64_t n, const E* image, const E* gradient, const Pixels& pixels, int64_t down, int64_t right, const Each& each) {
  const auto& [images, lines, line] = pixels.axes;
  const int64_t piece = equal_part(line.extent, MAX_LINE_PIXELS);
  for (int64_t i = 0; i < images.extent; i++)
    for (int64_t j = 0, count; j < lines.extent; j += count) {
      count = lines_from<HEIGHT>(pixels, j);
      for (int64_t k = 0; k < line.extent; k += piece) {
        TapLines<E> some{image + i * images.left + j * lines.left, gradient + i * images.right + j * lines.right,
                         pixels, down, right, j, count, {k, least(k + piece, line.extent)}};
        int64_t first = 0;
        for (; first + COLUMN <= n; first += COLUMN, some.gradient += COLUMN) each(some, first, All<COLUMN>());
        if (first < n) each(some, first, Some<COLUMN>(n - first));
      }
    }
}

// c[taps, n] = sum over pixels of the image, at the tap, times the gradient, channel by channel, for windows of HEIGHT
// x WIDTH taps. down, right: elements from a tap to the next one below, and to the right.
template <int HEIGHT, int WIDTH, class E>
inline void contract_tap_gradients(
    int64_t n, const E* image, const E* gradient, const Pixels& pixels, int64_t down, int64_t right, const Sums& c) {
  clear(HEIGHT * WIDTH, n, c);
  for_lines<HEIGHT>(n, image, gradient, pixels, down, right,
                    [&](const TapLines<E>& lines, int64_t first, const auto& lanes) PV_INLINE {
                      const auto own = [&](const auto& each) PV_INLINE {
                        each(0, first, [=](const E* at) PV_INLINE { return load(at, lanes).r[0]; });
                      };
                      add_taps<HEIGHT, WIDTH>(lines, lanes, own, c.from(0, first));
                    });
}

// c[channels, taps, n], like `contract_tap_gradients`, for groups of OUT columns and IN channels, TOGETHER of which
// share a register. Columns begin with a group; n is at most `Groups::PERIOD`. image: of the first group.
template <int HEIGHT, int WIDTH, int COUNT, int OUT, int IN, int TOGETHER, class E>
inline void contract_group_gradients(
    int64_t channels, int64_t n, int64_t from, const E* image, const E* gradient, const Pixels& pixels, int64_t down,
    int64_t right, const Sums& c) {
  using G = Groups<float, OUT, IN, TOGETHER>;
  const int64_t group = from / OUT;
  const Some<COLUMN> in(least(TOGETHER, COUNT - group) * IN);
  const auto shared = [&](const auto& each) PV_INLINE {
    [&]<int... C>(std::integer_sequence<int, C...>) PV_INLINE {
      (each(C, 0, [=](const E* at) PV_INLINE { return G::template pick<C>(load(at, in).r[0]); }), ...);
    }(std::make_integer_sequence<int, IN>());
  };
  const auto alone = [&](const auto& each) PV_INLINE {
    for (int64_t k = 0; k < channels; k++) each(k, k, [](const E* at) PV_INLINE { return broadcast(load(at)); });
  };
  clear(channels * HEIGHT * WIDTH, n, c);
  for_lines<HEIGHT>(n, image + group * IN, gradient, pixels, down, right,
                    [&](const TapLines<E>& lines, int64_t first, const auto& lanes) PV_INLINE {
                      if constexpr (G::SHARED) add_taps<HEIGHT, WIDTH>(lines, lanes, shared, c.from(0, first));
                      else add_taps<HEIGHT, WIDTH>(lines, lanes, alone, c.from(0, first));
                    });
}

}  // namespace pv
