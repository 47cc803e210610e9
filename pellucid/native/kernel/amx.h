// The micro-kernel of matrix products in bf16 for machines with AMX, which multiply whole tiles.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to the 16 x 16 sums of one tile the products of a
// tile of 16 rows of the left operand, 16 units each, and a tile of 16 units of the right one, 16 columns each, as in
// packed panels. Two by two tiles of sums are computed at a time.
//
// The shape of tiles is a state of the processor. `Amx` configures it, where it changes, and releases it at the end;
// the function that computes a block creates one, in a `BlockState`, and passes it on.
namespace pv {

// Size of the parts when `all` is divided into equal parts of at most `most`, as few as possible: tiles of one shape.
PV_FN int64_t equal_part(int64_t all, int64_t most) {
  const int64_t parts = (all - 1) / most + 1;
  return (all + parts - 1) / parts;
}

constexpr int AMX_LOADS = 4;  // tile loads for AMX_ROWS rows and AMX_TILE units; each is a step of `Prefetcher`

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define PV_AMX

template <class F> constexpr bool BY_AMX = std::is_same_v<F, bf16>;

// The configuration of tiles. Tiles 0 to 3 have sums, 4 and 5 rows of the left operand, 6 and 7 units of the right one.
// The upper tiles of sums and of the left operand have `above` rows, the lower ones `below`.
class Amx {
  int64_t above_ = 0, below_ = 0, units_ = 0;

 public:
  Amx() = default;
  Amx(const Amx&) = delete;
  ~Amx() {
    if (above_) _tile_release();
  }
  PV_FN void configure(int64_t above, int64_t below, int64_t units) {
    if (above == above_ && below == below_ && units == units_) return;
    above_ = above, below_ = below, units_ = units;
    struct alignas(64) {
      uint8_t palette, start, zero[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shape = {.palette = 1};
    const auto set = [&](int tile, int64_t rows, int64_t lanes) {
      shape.rows[tile] = uint8_t(rows), shape.row_bytes[tile] = uint16_t(rows ? lanes * 4 : 0);
    };
    for (int i : {0, 1}) set(i, above, AMX_TILE), set(2 + i, below, AMX_TILE), set(6 + i, units, AMX_TILE);
    set(4, above, units), set(5, below, units);
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
};

// Tiles of the left operand, step by step, here of a matrix: the upper one begins at `at()` and has `rows` rows, `row`
// bytes apart; the lower one begins `below` bytes after it. step: elements from the tiles of one step to those of the
// next.
struct MatrixTiles {
  const bf16* first;
  int64_t rows, row, below, step;
  PV_FN const bf16* at() const { return first; }
  PV_FN void next() { first += step; }
};

// Sums of C registers of columns for one tile of rows, or, if BELOW, two: of `steps` times `units` units, then of a
// last tile of both operands, if not null, which is padded with zeros.
template <int C, bool BELOW, class Tiles>
PV_FN void amx_sums(
    int64_t steps, int64_t units, Tiles a, Rows b, const Sums& c, const float* last_a, const float* last_b,
    Prefetcher& prefetcher) {
  Prefetcher local = prefetcher;
  asm volatile("" : : : "memory");  // GCC does not know what tiles read
  constexpr int64_t UNIT = sizeof(float);
  const int64_t line = b.step * UNIT, step = c.step * UNIT;
  float* below = c.at + a.rows * c.step;
  if (c.more) {
    _tile_loadd(0, c.at, step);
    if constexpr (C == 2) _tile_loadd(1, c.at + COLUMN, step);
    if constexpr (BELOW) _tile_loadd(2, below, step);
    if constexpr (BELOW && C == 2) _tile_loadd(3, below + COLUMN, step);
  } else {
    _tile_zero(0);
    if constexpr (C == 2) _tile_zero(1);
    if constexpr (BELOW) _tile_zero(2);
    if constexpr (BELOW && C == 2) _tile_zero(3);
  }
  const auto add = [&](const void* left, int64_t row, int64_t lower, const float* right, int64_t line) PV_INLINE {
    _tile_loadd(6, right, line);
    local.step<true>();
    _tile_loadd(4, left, row);
    local.step<true>();
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 2) {
      _tile_loadd(7, right + COLUMN, line);
      local.step<true>();
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (BELOW) {
      _tile_loadd(5, (const char*)left + lower, row);
      local.step<true>();
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
    }
  };
  for (; steps > 0; steps--, a.next(), b.at += units * b.step) add(a.at(), a.row, a.below, b.at, line);
  if (last_a) add(last_a, AMX_TILE * UNIT, AMX_TILE * AMX_TILE * UNIT, last_b, COLUMNS * UNIT);
  prefetcher = local;
  _tile_stored(0, c.at, step);
  if constexpr (C == 2) _tile_stored(1, c.at + COLUMN, step);
  if constexpr (BELOW) _tile_stored(2, below, step);
  if constexpr (BELOW && C == 2) _tile_stored(3, below + COLUMN, step);
}

// c[m, C registers] (+)= a[m, k] @ b[k, C registers], with k units, which are contiguous in rows of a.
template <int C>
PV_FN void amx_tiles(
    Amx& amx, Prefetcher& prefetcher, int64_t m, int64_t k, const Matrix<bf16>& left, const Rows& b, const Sums& c) {
  const int64_t pieces = (k + AMX_TILE - 1) / AMX_TILE;
  const bool even = k % pieces == 0;
  const int64_t units = even ? k / pieces : AMX_TILE, steps = k / units, rest = k - steps * units;
  alignas(64) float last_a[AMX_ROWS * AMX_TILE], last_b[AMX_TILE * COLUMNS];
  if (!even) {
    std::memset(last_a, 0, sizeof last_a);
    std::memset(last_b, 0, sizeof last_b);
    for (int64_t i = 0; i < rest; i++)
      std::memcpy(last_b + i * COLUMNS, b.at + (steps * units + i) * b.step, C * COLUMN * sizeof(float));
  }
  const int64_t rows = equal_part(m, AMX_ROWS);
  for (int64_t i = 0; i < m; i += rows) {
    const int64_t count = least(rows, m - i), above = least(AMX_TILE, count), below = count - above;
    const Matrix<bf16> a = left.from(i, 0);
    for (int64_t j = 0; !even && j < above + below; j++)
      std::memcpy(last_a + j * AMX_TILE, a(j, TERMS<bf16> * steps * units), size_t(rest) * sizeof(float));
    amx.configure(above, below, units);
    const int64_t row = a.row * int64_t(sizeof(bf16));
    const MatrixTiles tiles{a.at, AMX_TILE, row, AMX_TILE * row, TERMS<bf16> * units};
    const float* last = even ? nullptr : last_a;
    if (below) amx_sums<C, true>(steps, units, tiles, b, c.from(i, 0), last, last_b, prefetcher);
    else amx_sums<C, false>(steps, units, tiles, b, c.from(i, 0), last, last_b, prefetcher);
  }
}

#else

template <class F> constexpr bool BY_AMX = false;
struct Amx {};

#endif

// The state that the products of a block share.
struct BlockState {
  Amx amx;
  Prefetcher prefetcher;
};

}  // namespace pv
