// The operands and results of the micro-kernels of matrix products.
//
// A unit, of four bytes, is what they multiply: a term in f32, or two adjacent terms in bf16 where the machine has an
// instruction that adds the products of such pairs to a sum in f32. Other narrow floats are converted to f32 when they
// are packed. So packed operands have the same layout for all types.
namespace pv {

// The micro-kernel uses registers for ROWS x 2 sums, two registers of b, and a broadcast unit of a.
constexpr int COLUMN = REGISTER / int(sizeof(float));  // lanes of a register
constexpr int COLUMNS = 2 * COLUMN;
constexpr int ROWS = REGISTER == 64 ? 12 : 6;
constexpr int LINE = 64;  // bytes of a cache line

// A number of columns, rounded up to whole panels.
constexpr int64_t panels_of(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS * COLUMNS; }

using Column = Vec<float, COLUMN>;
using ColumnReg = Column::reg;

// The type that an element of type E is multiplied as, and how many of these a unit has. It is a member of a struct,
// not a conditional type, which GCC and Clang mangle differently: one may link what the other compiled.
template <class E> struct FactorOf { using type = float; };
#ifdef __AVX512BF16__
template <> struct FactorOf<bf16> { using type = bf16; };
#endif
template <class Integer, class E> struct FactorOf<Cast<Integer, E>> : FactorOf<E> {};
template <class E> using Factor = typename FactorOf<E>::type;
template <class E> constexpr int TERMS = int(sizeof(float) / sizeof(Factor<E>));
// Number of units for a number of terms; the last one may consist of a term and zero.
template <class E> constexpr int64_t units_of(int64_t terms) { return (terms + TERMS<E> - 1) / TERMS<E>; }
// Terms in DEPTH units.
template <class E> constexpr int64_t TERMS_AT_ONCE = DEPTH * TERMS<E>;
// Whether elements are multiplied without conversion.
template <class E> constexpr bool is_factor = std::is_same_v<E, Factor<E>>;

PV_FN ColumnReg read_column(const float* p) { return load<float>(p, All<COLUMN>()).r[0]; }
PV_FN void write_column(float* p, ColumnReg a) { store<float>(p, Column{{a}}, All<COLUMN>()); }
PV_FN ColumnReg broadcast(float a) { return (ColumnReg)PV_PS(set1)(a); }
PV_FN ColumnReg multiply_add(ColumnReg a, ColumnReg b, ColumnReg c) { return (ColumnReg)PV_PS(fmadd)(a, b, c); }

// Registers of units have the type of floats; only `multiply_units` interprets them.
template <class F> PV_FN ColumnReg broadcast_unit(const F* p) {
  float unit;
  std::memcpy(&unit, p, sizeof unit);
  return broadcast(unit);
}
template <class F> PV_FN ColumnReg multiply_units(ColumnReg a, ColumnReg b, ColumnReg c) {
#ifdef __AVX512BF16__
  if constexpr (TERMS<F> == 2) return (ColumnReg)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add(a, b, c);
}

// Units of two floats that are representable in bf16.
PV_FN ColumnReg pair_up(ColumnReg even, ColumnReg odd) {
  using Bits = Reg<uint32_t, COLUMN>;
  return (ColumnReg)((Bits)even >> 16 | (Bits)odd);
}

// COLUMN units whose terms are contiguous.
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
// COLUMN adjacent units, or n of them and zeros. step: elements from the first term of a unit to the second.
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
// Copy COLUMNS such units, in two registers, each interleaved from both lines by one shuffle.
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

// A strided matrix in memory: element (i, j) is at[i * row + j * column].
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

// The rows of a left operand as the micro-kernel reads them: `rows` has the first ROWS of them; each next group of ROWS
// rows is `group` elements further.
template <class F> struct LeftRows {
  Matrix<F> rows;
  int64_t group;
  PV_FN LeftRows(const Matrix<F>& a) : rows(a), group(ROWS * a.row) {}
  PV_FN LeftRows(const Matrix<F>& first, int64_t step) : rows(first), group(step) {}
  PV_FN LeftRows after(int64_t groups) const { return {{rows.at + groups * group, rows.row, rows.column}, group}; }
};

// Whether the rows of a, of k terms, can be read in place as rows of units.
template <class E> PV_FN bool has_units(const Matrix<E>& a, int64_t k) {
  return is_factor<E> && (TERMS<E> == 1 || (a.column == 1 && k % TERMS<E> == 0));
}

// The block of sums to compute, in rows of `step` elements. more: it has the sums of earlier terms, to add to. past:
// these sums are final, and are written by non-temporal stores.
struct Sums {
  float* at;
  int64_t step;
  bool more, past = false;
  PV_FN Sums from(int64_t i, int64_t j) const { return {at + i * step + j, step, more, past}; }
  // The block when terms [term, term + depth) of `all` are added.
  PV_FN Sums after(int64_t term, int64_t depth, int64_t all) const {
    return {at, step, more || term > 0, past && term + depth >= all};
  }
};

// Whether every register of every row is at an aligned address.
PV_FN bool is_aligned(const Sums& c) { return (uintptr_t(c.at) | uintptr_t(c.step * sizeof(float))) % REGISTER == 0; }

// The right operand b as the micro-kernel reads it, unit by unit: rows of floats or packed units, `step` apart; or a
// matrix of a narrow type, in place.
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
template <class E> using UnpackedRows = std::conditional_t<std::is_same_v<E, float>, Rows, NarrowRows<E>>;

// Prefetches memory that is read next, in small steps between the steps of a product. By default it prefetches only
// itself.
class Prefetcher {
  const char* at_;
  int64_t pace_ = 0, run_ = INT64_MAX, left_ = INT64_MAX, jump_ = 0;  // run_, left_: steps

 public:
  Prefetcher() : at_((const char*)this) {}
  // pace: bytes per step.
  Prefetcher(const void* at, int64_t pace) : at_((const char*)at), pace_(pace) {}
  Prefetcher(const Prefetcher&) = default;
  // Field by field: a wide load of fields that were just written one by one would stall (no store forwarding).
  PV_FN Prefetcher& operator=(const Prefetcher& other) {
    at_ = other.at_, pace_ = other.pace_, run_ = other.run_, left_ = other.left_, jump_ = other.jump_;
    return *this;
  }
  // Prefetch `runs` runs of `bytes` bytes, `stride` bytes apart, in `steps` steps; nothing if that takes more than
  // `most` bytes per step.
  static Prefetcher over(const void* at, int64_t bytes, int64_t runs, int64_t stride, int64_t steps, int64_t most) {
    const auto share = [](int64_t all, int64_t parts) {  // if more than a line, whole lines
      const int64_t part = (all + parts - 1) / parts;
      return part > LINE ? (part + LINE - 1) / LINE * LINE : part;
    };
    const int64_t fewest = share(bytes * runs, steps);
    if (fewest == 0 || fewest > most) return {};
    const int64_t run = (bytes + fewest - 1) / fewest, pace = share(bytes, run);
    Prefetcher prefetcher{at, pace};
    prefetcher.run_ = prefetcher.left_ = run;
    prefetcher.jump_ = stride - run * pace;
    return prefetcher;
  }
  // ALL: a step may be longer than a cache line.
  template <bool ALL = false> PV_FN void step() {
    __builtin_prefetch(at_, 0, 2);  // into the L2 cache: L1 is full
    for (int64_t line = LINE; ALL && line < pace_; line += LINE) __builtin_prefetch(at_ + line, 0, 2);
    at_ += pace_;
    if (--left_ == 0) at_ += jump_, left_ = run_;
  }
};

}  // namespace pv
