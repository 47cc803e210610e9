// The micro-kernel of matrix products in bf16 for machines that multiply whole tiles (AMX).
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to the 16 x 16 sums of one tile the products of a tile
// of 16 rows of the left operand, 16 units each, and a tile of 16 units of the right one, 16 columns each: what packed
// panels hold already. Two by two tiles of sums are computed at a time.
//
// How many rows and units tiles have is a state of the processor. `Amx` sets it, where it changes, and clears it at the
// end; who computes a block makes one, in a `Beside`, and hands it down.
namespace pv {

// How many of `all` are in the largest of equal parts, as few as have at most `most` each: tiles of one shape.
PV_FN int64_t equal_part(int64_t all, int64_t most) {
  const int64_t parts = (all - 1) / most + 1;
  return (all + parts - 1) / parts;
}

constexpr int AMX_LOADS = 4;  // tiles that are read for AMX_ROWS rows at a time: as many steps of `Ahead`

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define PV_AMX

template <class F> constexpr bool BY_AMX = std::is_same_v<F, bf16>;

// Tiles 0 to 3 hold sums, 4 and 5 rows of the left operand, 6 and 7 units of the right one. Of sums, and of the left
// operand, the first tiles have `above` rows and the others `below`.
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

// Tiles of the left operand, step by step: the upper one is at `at()` and has so many rows, `row` bytes apart; the lower one
// begins `below` bytes further. Those of a matrix follow one another.
struct MatrixTiles {
  const bf16* first;
  int64_t rows, row, below, step;
  PV_FN const bf16* at() const { return first; }
  PV_FN void next() { first += step; }
};

// Sums of C registers of columns for one or two tiles of rows: `steps` times `units` units, then a last tile of both
// operands, if there is one, in which what is too much is zero.
template <int C, bool BELOW, class Tiles>
PV_FN void amx_sums(
    int64_t steps, int64_t units, Tiles a, Rows b, const Sums& c, const float* last_a, const float* last_b,
    Ahead& beside) {
  Ahead ahead = beside;
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
    ahead.step<true>();
    _tile_loadd(4, left, row);
    ahead.step<true>();
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 2) {
      _tile_loadd(7, right + COLUMN, line);
      ahead.step<true>();
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (BELOW) {
      _tile_loadd(5, (const char*)left + lower, row);
      ahead.step<true>();
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C == 2) _tile_dpbf16ps(3, 5, 7);
    }
  };
  for (; steps > 0; steps--, a.next(), b.at += units * b.step) add(a.at(), a.row, a.below, b.at, line);
  if (last_a) add(last_a, AMX_TILE * UNIT, AMX_TILE * AMX_TILE * UNIT, last_b, COLUMNS * UNIT);
  beside = ahead;
  _tile_stored(0, c.at, step);
  if constexpr (C == 2) _tile_stored(1, c.at + COLUMN, step);
  if constexpr (BELOW) _tile_stored(2, below, step);
  if constexpr (BELOW && C == 2) _tile_stored(3, below + COLUMN, step);
}

// c[m, C registers] (+)= a[m, k] @ b[k, C registers], with k units, which are neighbours in rows of a.
template <int C>
PV_FN void amx_tiles(
    Amx& amx, Ahead& ahead, int64_t m, int64_t k, const Matrix<bf16>& left, const Rows& b, const Sums& c) {
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
    if (below) amx_sums<C, true>(steps, units, tiles, b, c.from(i, 0), last, last_b, ahead);
    else amx_sums<C, false>(steps, units, tiles, b, c.from(i, 0), last, last_b, ahead);
  }
}

#else

template <class F> constexpr bool BY_AMX = false;
struct Amx {};

#endif

// What goes on beside the products of a block.
struct Beside {
  Amx amx;
  Ahead ahead;
};

}  // namespace pv
