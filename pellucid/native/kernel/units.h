// What the micro-kernels of matrix products read and write.
//
// They multiply units of four bytes. A unit is a term in f32; or, where the machine adds the products of such pairs to
// a sum in f32, two neighbouring terms in bf16. Other narrow floats become f32 when they are packed. So all that is
// packed has the same form, whatever it was made of.
namespace pv {

// What the micro-kernel keeps in registers: ROWS x 2 sums, two registers of b, and a unit of a.
constexpr int COLUMN = REGISTER / int(sizeof(float));  // lanes of a register
constexpr int COLUMNS = 2 * COLUMN;
constexpr int ROWS = REGISTER == 64 ? 12 : 6;
constexpr int LINE = 64;  // bytes of a line of a cache

// So many columns, up to a whole panel.
constexpr int64_t panels_of(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS * COLUMNS; }

using Column = Vec<float, COLUMN>;
using ColumnReg = Column::reg;

// What an element of type E is multiplied as, and how many of these make a unit. It is a struct's because GCC and Clang
// give different names to functions whose arguments' types have conditions; one may link what the other compiled.
template <class E> struct FactorOf { using type = float; };
#ifdef __AVX512BF16__
template <> struct FactorOf<bf16> { using type = bf16; };
#endif
template <class Integer, class E> struct FactorOf<Cast<Integer, E>> : FactorOf<E> {};
template <class E> using Factor = typename FactorOf<E>::type;
template <class E> constexpr int TERMS = int(sizeof(float) / sizeof(Factor<E>));
// How many units hold so many terms; the last one may hold one term and zero.
template <class E> constexpr int64_t units_of(int64_t terms) { return (terms + TERMS<E> - 1) / TERMS<E>; }
// Terms in DEPTH units.
template <class E> constexpr int64_t TERMS_AT_ONCE = DEPTH * TERMS<E>;
// True if elements are multiplied as they lie.
template <class E> constexpr bool is_factor = std::is_same_v<E, Factor<E>>;

PV_FN ColumnReg read_column(const float* p) { return load<float>(p, All<COLUMN>()).r[0]; }
PV_FN void write_column(float* p, ColumnReg a) { store<float>(p, Column{{a}}, All<COLUMN>()); }
PV_FN ColumnReg spread(float a) { return (ColumnReg)PV_PS(set1)(a); }
PV_FN ColumnReg multiply_add(ColumnReg a, ColumnReg b, ColumnReg c) { return (ColumnReg)PV_PS(fmadd)(a, b, c); }

// Units as lanes of floats; what they hold matters to `multiply_units` alone.
template <class F> PV_FN ColumnReg spread_unit(const F* p) {
  float unit;
  std::memcpy(&unit, p, sizeof unit);
  return spread(unit);
}
template <class F> PV_FN ColumnReg multiply_units(ColumnReg a, ColumnReg b, ColumnReg c) {
#ifdef __AVX512BF16__
  if constexpr (TERMS<F> == 2) return (ColumnReg)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add(a, b, c);
}

// Units of two floats whose bits beyond bf16 are zero.
PV_FN ColumnReg pair_up(ColumnReg even, ColumnReg odd) {
  using Bits = Reg<uint32_t, COLUMN>;
  return (ColumnReg)((Bits)even >> 16 | (Bits)odd);
}

// COLUMN units whose terms are neighbours, all of them or those of each unit.
template <class E> PV_FN ColumnReg read_along(const E* p) {
  if constexpr (TERMS<E> == 2 && is_factor<E>) {
    return read_column((const float*)p);
  } else if constexpr (TERMS<E> == 2) {
    const auto all = load<E>(p, All<COLUMNS>());
    return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return pair_up(__builtin_shufflevector(all.r[0], all.r[1], (2 * K)...),
                     __builtin_shufflevector(all.r[0], all.r[1], (2 * K + 1)...));
    }(std::make_integer_sequence<int, COLUMN>());
  } else {
    return load<E>(p, All<COLUMN>()).r[0];
  }
}
// COLUMN neighbouring units whose terms lie `step` apart, or n of them and zeros.
template <class E, class N = All<COLUMN>> PV_FN ColumnReg read_across(const E* p, int64_t step, const N& n = {}) {
  if constexpr (TERMS<E> == 2 && !is_factor<E>) {
    return pair_up(load<E>(p, n).r[0], load<E>(p + step, n).r[0]);
  } else if constexpr (TERMS<E> == 2) {
    const auto even = convert<uint32_t>(load<uint16_t>((const uint16_t*)p, n));
    const auto odd = convert<uint32_t>(load<uint16_t>((const uint16_t*)(p + step), n));
    return (ColumnReg)(even.r[0] | odd.r[0] << 16);
  } else {
    return load<E>(p, n).r[0];
  }
}
// COLUMNS of them, copied: each register that is written takes its words from both lines at once.
template <class E> PV_FN void copy_across(const E* p, int64_t step, float* to) {
  if constexpr (TERMS<E> == 2 && is_factor<E>) {
    const auto even = load<uint16_t>((const uint16_t*)p, All<COLUMNS>()).r[0];
    const auto odd = load<uint16_t>((const uint16_t*)(p + step), All<COLUMNS>()).r[0];
    [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      write_column(to, (ColumnReg)__builtin_shufflevector(even, odd, (K % 2 * COLUMNS + K / 2)...));
      write_column(to + COLUMN, (ColumnReg)__builtin_shufflevector(even, odd, (K % 2 * COLUMNS + K / 2 + COLUMN)...));
    }(std::make_integer_sequence<int, COLUMNS>());
  } else {
    write_column(to, read_across(p, step));
    write_column(to + COLUMN, read_across(p + COLUMN, step));
  }
}

template <class F, class E> PV_FN F factor_of(E a) {
  if constexpr (std::is_same_v<E, F>) return a;
  else if constexpr (std::is_same_v<F, float>) return load(&a);
  else return F{bf16_bits(load(&a))};
}

// A matrix as it lies: element (i, j) is at[i * row + j * column].
template <class E> struct Matrix {
  using Element = E;
  const E* at;
  int64_t row, column;
  PV_FN const E* operator()(int64_t i, int64_t j) const { return at + i * row + j * column; }
  PV_FN Matrix from(int64_t i, int64_t j) const { return {(*this)(i, j), row, column}; }
};
template <class E, class Integer> PV_FN Matrix<Cast<Integer, E>> casting(const Matrix<Integer>& a) {
  return {(const Cast<Integer, E>*)a.at, a.row, a.column};
}
template <class E> PV_FN Matrix<E> transposed(const Matrix<E>& a) { return {a.at, a.column, a.row}; }

// The rows of a left operand as the micro-kernel reads them: `rows` holds the first ROWS of them, and each next ROWS lie
// `group` elements further.
template <class F> struct LeftRows {
  Matrix<F> rows;
  int64_t group;
  PV_FN LeftRows(const Matrix<F>& a) : rows(a), group(ROWS * a.row) {}
  PV_FN LeftRows(const Matrix<F>& first, int64_t step) : rows(first), group(step) {}
  PV_FN LeftRows after(int64_t groups) const { return {{rows.at + groups * group, rows.row, rows.column}, group}; }
};

// True if the rows of a, of k terms, lie as rows of units.
template <class E> PV_FN bool has_units(const Matrix<E>& a, int64_t k) {
  return is_factor<E> && (TERMS<E> == 1 || (a.column == 1 && k % TERMS<E> == 0));
}

// The block that is computed, in rows of `step` elements. `more`: it holds the sums of earlier terms. `past`: these
// sums are the last, and go past the caches.
struct Sums {
  float* at;
  int64_t step;
  bool more, past = false;
  PV_FN Sums from(int64_t i, int64_t j) const { return {at + i * step + j, step, more, past}; }
  // The same after the terms from `term` on, of which so many of `all` are added now.
  PV_FN Sums after(int64_t term, int64_t depth, int64_t all) const {
    return {at, step, more || term > 0, past && term + depth >= all};
  }
};

// Whether every register of a row lies at an aligned address.
PV_FN bool is_aligned(const Sums& c) { return (uintptr_t(c.at) | uintptr_t(c.step * sizeof(float))) % REGISTER == 0; }

// What the micro-kernel reads of b, unit by unit: floats whose rows lie `step` apart, packed units among them; or a
// matrix of any type as it lies.
struct Rows {
  const float* at;
  int64_t step;
  PV_FN ColumnReg read(int j) const { return read_column(at + j); }
  PV_FN void next() { at += step; }
};
template <class E> struct NarrowRows {
  const E* at;
  int64_t step;
  PV_FN ColumnReg read(int j) const { return read_across(at + j, step); }
  PV_FN void next() { at += TERMS<E> * step; }
};
template <class E> using LyingRows = std::conditional_t<std::is_same_v<E, float>, Rows, NarrowRows<E>>;

// Memory that is read next: asked for bit by bit, in between, so that it comes while products are computed. By default
// it is nothing: its own memory, again and again.
class Ahead {
  const char* at_;
  int64_t pace_ = 0, run_ = INT64_MAX, left_ = INT64_MAX, jump_ = 0;  // run_, left_: steps

 public:
  Ahead() : at_((const char*)this) {}
  // pace: bytes from one step to the next.
  Ahead(const void* at, int64_t pace) : at_((const char*)at), pace_(pace) {}
  Ahead(const Ahead&) = default;
  // Field by field: copied as a whole, it would wait for the fields that were just written.
  PV_FN Ahead& operator=(const Ahead& other) {
    at_ = other.at_, pace_ = other.pace_, run_ = other.run_, left_ = other.left_, jump_ = other.jump_;
    return *this;
  }
  // So many runs of so many bytes, which begin `stride` bytes apart, in all these steps; nothing, if that takes more than
  // `most` bytes a step.
  static Ahead over(const void* at, int64_t bytes, int64_t runs, int64_t stride, int64_t steps, int64_t most) {
    const auto share = [](int64_t all, int64_t parts) {  // of more than a line whole lines
      const int64_t part = (all + parts - 1) / parts;
      return part > LINE ? (part + LINE - 1) / LINE * LINE : part;
    };
    const int64_t fewest = share(bytes * runs, steps);
    if (fewest == 0 || fewest > most) return {};
    const int64_t run = (bytes + fewest - 1) / fewest, pace = share(bytes, run);
    Ahead ahead{at, pace};
    ahead.run_ = ahead.left_ = run;
    ahead.jump_ = stride - run * pace;
    return ahead;
  }
  // ALL: steps may be longer than a line of the cache.
  template <bool ALL = false> PV_FN void step() {
    __builtin_prefetch(at_, 0, 2);  // into the second cache: the first one is full
    for (int64_t line = LINE; ALL && line < pace_; line += LINE) __builtin_prefetch(at_ + line, 0, 2);
    at_ += pace_;
    if (--left_ == 0) at_ += jump_, left_ = run_;
  }
};

}  // namespace pv
