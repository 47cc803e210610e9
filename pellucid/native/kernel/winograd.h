// Convolutions of 3 x 3 taps with stride 1, in f32, with 16 multiplications for 4 pixels instead of 36: Winograd's
// F(2 x 2, 3 x 3), see Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016.
//
// A tile of 4 x 4 pixels d of the image yields 2 x 2 pixels of the result. With the weights g of a channel,
//
//     result = A' [ (G g G') * (B' d B) ] A        with the sum over channels in the brackets, for each of 16 positions
//
// so that each position is a matrix product, of tiles and channels by channels and columns, for the micro-kernel. The
// elements of B and A are 0, 1 and -1; those of G also halves. Frozen weights are transformed before the program runs,
// others in each block.
//
// A number that is not finite would affect a whole tile: then the block is computed window by window.
namespace pv {

// The transforms along one axis: B' d of four pixels, G g of three weights, A' m of four sums.
template <class T> PV_FN void transform_pixels(const T (&d)[4], T (&to)[4]) {
  to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
}
template <class T> PV_FN void transform_weights(const T (&g)[3], T (&to)[4]) {
  to[0] = g[0], to[1] = (g[0] + g[1] + g[2]) / 2, to[2] = (g[0] - g[1] + g[2]) / 2, to[3] = g[2];
}
template <class T> PV_FN void transform_back(const T (&m)[4], T (&to)[2]) {
  to[0] = m[0] + m[1] + m[2], to[1] = m[1] - m[2] - m[3];
}

// A transform along both axes, from read(y, x) to write(y, x, result). IN, OUT: number of elements per axis.
template <class T, int IN, int OUT, class Transform, class Read, class Write>
PV_FN void along_both(Transform transform, Read read, Write write) {
  T half[IN][OUT];  // [x][y]
  for (int x = 0; x < IN; x++) {
    T down[IN];
    for (int y = 0; y < IN; y++) down[y] = read(y, x);
    transform(down, half[x]);
  }
  for (int y = 0; y < OUT; y++) {
    T across[IN], results[OUT];
    for (int x = 0; x < IN; x++) across[x] = half[x][y];
    transform(across, results);
    for (int x = 0; x < OUT; x++) write(y, x, results[x]);
  }
}

// Transform the weights b[9 channels, N], terms as in `pack_panels`, to panels of columns, each with `channels` rows
// for every position. The output of `pack_panels` for the weights follows.
template <int64_t N, int64_t K, int64_t SIZE>
inline void pack_tiles(int64_t area, const Matrix<float>& b, float* to) {
  constexpr int64_t columns = panels_of(N), channels = K / TAPS;
  const auto weight = [&](int64_t tap, int64_t channel, int64_t j) -> double {
    return j < N ? *b(area == 1 ? tap * channels + channel : channel * area + tap, j) : 0.0f;
  };
  for (int64_t j = 0; j < columns; j++)
    for (int64_t k = 0; k < channels; k++) {
      float* next = to + (j / COLUMNS * PLACES * channels + k) * COLUMNS + j % COLUMNS;
      along_both<double, 3, 4>(
          transform_weights<double>, [&](int y, int x) PV_INLINE { return weight(3 * y + x, k, j); },
          [&](int y, int x, double a) PV_INLINE { next[(4 * y + x) * channels * COLUMNS] = float(a); });
    }
  pack_panels<N, K, SIZE - PLACES * channels * columns, float>(area, b, to + PLACES * channels * columns);
}

// The output of `pack_tiles`, from a column on that is a multiple of COLUMNS.
struct TilePanels {
  const float* at;
  Panels windows;
};
PV_FN TilePanels tile_panels_from(const float* packed, int64_t n, int64_t k, int64_t first) {
  const int64_t columns = panels_of(n), channels = k / TAPS;
  const float* windows = packed + PLACES * channels * columns;
  return {packed + first * PLACES * channels, panels_from<float>(windows, n, k, first)};
}

// The transformed weights of one panel: `channels` rows for each position.
struct TransformedPanel {
  const float* at;
  int64_t channels;
  PV_FN Rows operator()(int64_t position) const { return {at + position * channels * COLUMNS, COLUMNS}; }
};

// Transform one panel of weights b[9 CHANNELS, n], n at most COLUMNS, that are not packed: `depth` channels from
// `first` on, with space for CHUNK of them. planes: the taps of a channel are adjacent, else the channels of a tap.
// flipped: see `is_flipped`.
template <int CHANNELS, int CHUNK>
[[gnu::noinline, gnu::noipa]] inline void transform_panel(
    const Matrix<float>& b, int64_t n, int64_t first, int64_t depth, bool planes, bool flipped, float* to) {
  alignas(64) float some[TAPS * COLUMN * COLUMNS];  // COLUMN channels, tap by tap
  static const ByTap by_tap(TAPS, COLUMN);
  for (int64_t k = 0; k < depth; k += COLUMN) {
    if (planes)
      pack_columns(b.from((first + k) * TAPS, 0), TAPS * COLUMN, n, some, COLUMN_PANEL, by_tap);
    else
      for (int tap = 0; tap < TAPS; tap++)
        pack_columns(b.from(tap * CHANNELS + first + k, 0), COLUMN, n, some + tap * COLUMN * COLUMNS);
    const auto mirrored = [&](int i) PV_INLINE { return flipped && i % 3 == 0 ? 3 - i : i; };
    for (int i = 0; i < COLUMN * COLUMNS; i += COLUMN)
      along_both<ColumnReg, 3, 4>(
          transform_weights<ColumnReg>,
          [&](int y, int x) PV_INLINE { return read_column(some + (3 * y + x) * COLUMN * COLUMNS + i); },
          [&](int y, int x, ColumnReg a) PV_INLINE {
            write_column(to + ((4 * mirrored(y) + mirrored(x)) * CHUNK + k) * COLUMNS + i, a);
          });
  }
}

// A cache of the transformed weights (see `pack_tiles`) of some columns, for successive blocks of these columns.
template <int CHANNELS, int N> class KeptTiles {
 public:
  static constexpr bool CACHED = true;
  ~KeptTiles() { std::free(at_); }
  // The transform of b[9 CHANNELS, n]; null if memory could not be allocated.
  const float* operator()(const Matrix<float>& b, int64_t n, bool planes, bool flipped) {
    if (of_ == b.at) return at_;
    if (!at_) at_ = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * PLACES * CHANNELS * N));
    for (int64_t j = 0; j < n && at_; j += COLUMNS) {
      float* panel = at_ + j * PLACES * CHANNELS;
      transform_panel<CHANNELS, CHANNELS>(b.from(0, j), least(n - j, COLUMNS), 0, CHANNELS, planes, flipped, panel);
    }
    if (at_) of_ = b.at;
    return at_;
  }

 private:
  float* at_ = nullptr;
  const float* of_ = nullptr;
};

// No cache: each block transforms its weights.
struct NoTiles {
  static constexpr bool CACHED = false;
};

// Whether the taps of a window are in reverse order, as those of an image's gradient are. Then its weights are flipped,
// which swaps the first and the last position of each axis.
PV_FN bool is_flipped(const Window<float>& w) { return w.taps[0].step < 0; }
// The window with its taps in ascending order.
PV_FN Window<float> forwards(Window<float> w) {
  if (!is_flipped(w)) return w;
  w.at += 2 * (w.taps[0].step + w.taps[1].step);
  for (Edge& edge : w.edges) edge.first += 2 * (edge.taps[0] + edge.taps[1]);
  return w;
}

// Calls each(index, image, line, pixel) for the tiles of a block, with the first pixel of the result of each.
template <class Each> PV_FN void for_tiles(const Window<float>& w, Each each) {
  int64_t tile = 0;
  for (int64_t i = 0; i < w.rows[0].extent; i++)
    for (int64_t j = 0; j < w.rows[1].extent; j += 2)
      for (int64_t k = 0; k < w.rows[2].extent; k += 2) each(tile++, i, j, k);
}

// B' d B of all tiles: position p of tile t has CHANNELS elements at to + p * PLANE + t * STEP. Pixels that are out of
// bounds, or that no pixel of the block reads, are zero.
template <int CHANNELS, int STEP, int PLANE>
[[gnu::noinline, gnu::noipa]] inline void transform_tiles(const Window<float>& w, float* to) {
  alignas(64) static constexpr float zero_row[CHANNELS] = {};
  for_tiles(w, [&](int64_t tile, int64_t i, int64_t j, int64_t k) {
    const float* from[PLACES];
    for (int p = 0; p < PLACES; p++) {
      const int64_t line = j + p / 4, pixel = k + p % 4;
      const bool is_read = line < w.rows[1].extent + 2 && pixel < w.rows[2].extent + 2;
      const bool in_bounds = is_read && is_in_bounds(w.edges, i, line, pixel);
      from[p] = in_bounds ? w.at + i * w.rows[0].step + line * w.rows[1].step + pixel * w.rows[2].step : zero_row;
    }
    float* next = to + tile * STEP;
    for (int64_t c = 0; c < CHANNELS; c += COLUMN, next += COLUMN)
      along_both<ColumnReg, 4, 4>(
          transform_pixels<ColumnReg>, [&](int y, int x) PV_INLINE { return read_column(from[4 * y + x] + c); },
          [&](int y, int x, ColumnReg a) PV_INLINE { write_column(next + (4 * y + x) * PLANE, a); });
  });
}

// c = A' m A for the columns of one panel: position p of tile t is at m + p * PLANE + t * COLUMNS. False if a sum is
// not finite.
template <int PLANE>
[[gnu::noinline, gnu::noipa]] inline bool sums_of_tiles(const Window<float>& w, const float* m, const Sums& c) {
  ColumnReg none = {};  // NaN if a sum is not finite
  const int64_t lines = w.rows[1].extent, pixels = w.rows[2].extent;
  for_tiles(w, [&](int64_t tile, int64_t i, int64_t j, int64_t k) PV_INLINE {
    for (int column = 0; column < COLUMNS; column += COLUMN) {
      const float* from = m + tile * COLUMNS + column;
      along_both<ColumnReg, 4, 2>(
          transform_back<ColumnReg>, [&](int y, int x) PV_INLINE { return read_column(from + (4 * y + x) * PLANE); },
          [&](int y, int x, ColumnReg a) PV_INLINE {
            none = multiply_add(a, ColumnReg{}, none);
            if (j + y < lines && k + x < pixels)
              write_column(c.from((i * lines + j + y) * pixels + k + x, column).at, a);
          });
    }
  });
  return total<Sum>(Column{{none}}) == 0;
}

// Like `contract` of windows, for some pixels of a line and some columns at a time, so that it needs little additional
// stack.
template <int WIDTH, class Right>
[[gnu::noinline]] inline void contract_lines(
    int64_t n, int64_t k, const Window<float>& a, const Right& b, const Sums& c) {
  constexpr int PIXELS = 96, SOME = 4 * COLUMNS;
  int64_t row = 0;
  for (int64_t i = 0; i < a.rows[0].extent; i++)
    for (int64_t j = 0; j < a.rows[1].extent; j++)
      for (int64_t l = 0; l < a.rows[2].extent; l += PIXELS) {
        Window<float> piece = a;
        piece.at += i * a.rows[0].step + j * a.rows[1].step + l * a.rows[2].step;
        piece.rows[0].extent = piece.rows[1].extent = 1, piece.rows[2].extent = least(PIXELS, a.rows[2].extent - l);
        for (Edge& edge : piece.edges) edge.first += i * edge.rows[0] + j * edge.rows[1] + l * edge.rows[2];
        for (int64_t column = 0; column < n; column += SOME)
          contract<PIXELS, SOME, WIDTH>(least(SOME, n - column), k, piece, b.from(0, column), c.from(row, column));
        row += piece.rows[2].extent;
      }
}

// Like `contract` of windows, for a block of at most TILES tiles with CHANNELS channels. Weights that are neither
// packed nor cached are transformed for each block, CHUNK channels at a time.
template <int TILES, int N, int WIDTH, int CHANNELS, class Right, class Cache>
inline void contract_tiles(int64_t n, int64_t k, const Window<float>& a, const Right& b, const Sums& c, Cache&& cache) {
  constexpr bool PACKED = std::is_same_v<Right, TilePanels>, READY = PACKED || std::decay_t<Cache>::CACHED;
  constexpr int CHUNK = READY || CHANNELS < TRANSFORMED ? CHANNELS : TRANSFORMED;
  static_assert(N % COLUMNS == 0 && CHANNELS % COLUMN == 0);
  constexpr int STEP = CHANNELS + COLUMN, PLANE = TILES * STEP;  // so that tiles are in different cache sets
  constexpr int SUMS = TILES * COLUMNS + COLUMN;
  alignas(64) float pixels[PLACES * PLANE], sums[PLACES * SUMS], weights[READY ? 1 : PLACES * CHUNK * COLUMNS];
  const int64_t m = a.rows[0].extent * ((a.rows[1].extent + 1) / 2) * ((a.rows[2].extent + 1) / 2);
  const int64_t pieces = (m + ROWS - 1) / ROWS;  // of equal size: with few rows, latency is not hidden
  const float* ready = nullptr;
  if constexpr (PACKED) ready = b.at;
  else if constexpr (READY) ready = cache(b, n, a.planes, is_flipped(a));
  bool finite = ready || !READY;  // if allocation failed, compute window by window
  if (finite) transform_tiles<CHANNELS, STEP, PLANE>(forwards(a), pixels);
  for (int64_t j = 0; j < n && finite; j += COLUMNS) {
    for (int64_t first = 0; first < CHANNELS; first += CHUNK) {
      const int64_t depth = least(CHUNK, CHANNELS - first);
      TransformedPanel panel{weights, CHUNK};
      if constexpr (READY) panel.at = ready + j * PLACES * CHANNELS;
      else transform_panel<CHANNELS, CHUNK>(
          b.from(0, j), least(n - j, COLUMNS), first, depth, a.planes, is_flipped(a), weights);
      for (int p = 0; p < PLACES; p++) {
        BlockState state;
        if constexpr (READY) state.prefetcher = {panel(p + 1).at, COLUMNS * int64_t(sizeof(float)) / pieces + 1};
        const Matrix<float> left{pixels + p * PLANE + first, STEP, 1};
        for (int64_t piece = 0; piece < pieces; piece++) {
          const int64_t row = piece * m / pieces, last = (piece + 1) * m / pieces;
          const Sums to{sums + p * SUMS + row * COLUMNS, COLUMNS, first > 0};
          tiles<2>(state, last - row, depth, LeftRows(left.from(row, 0)), panel(p), to);
        }
      }
    }
    finite = sums_of_tiles<SUMS>(a, sums, c.from(0, j));
  }
  if (finite) return;
  if constexpr (PACKED) contract_lines<WIDTH>(n, k, a, b.windows, c);
  else contract_lines<WIDTH>(n, k, a, b, c);
}

}  // namespace pv
