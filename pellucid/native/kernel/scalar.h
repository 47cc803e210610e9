// The operators on scalars.
namespace pv {

// The functions of C's math.h, for floats, doubles, and integers as doubles.
namespace libm {
#define PV_LIBM(name)                                                                                    \
  PV_FN float name(float a) { return __builtin_##name##f(a); }                                           \
  template <class T> PV_FN double name(T a) { return __builtin_##name(double(a)); }
PV_LIBM(fabs) PV_LIBM(floor) PV_LIBM(ceil) PV_LIBM(trunc) PV_LIBM(nearbyint) PV_LIBM(sqrt)
PV_LIBM(exp) PV_LIBM(exp2) PV_LIBM(expm1) PV_LIBM(log) PV_LIBM(log2) PV_LIBM(log10) PV_LIBM(log1p)
PV_LIBM(sin) PV_LIBM(cos) PV_LIBM(tan) PV_LIBM(asin) PV_LIBM(acos) PV_LIBM(atan)
PV_LIBM(sinh) PV_LIBM(cosh) PV_LIBM(tanh) PV_LIBM(asinh) PV_LIBM(acosh) PV_LIBM(atanh)
PV_LIBM(erf) PV_LIBM(erfc) PV_LIBM(lgamma)
#undef PV_LIBM
#define PV_LIBM(name)                                                                                    \
  PV_FN float name(float a, float b) { return __builtin_##name##f(a, b); }                               \
  template <class T> PV_FN double name(T a, T b) { return __builtin_##name(double(a), double(b)); }
PV_LIBM(fmod) PV_LIBM(copysign) PV_LIBM(pow) PV_LIBM(atan2) PV_LIBM(hypot)
#undef PV_LIBM
PV_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class T> PV_FN double fma(T a, T b, T c) { return __builtin_fma(double(a), double(b), double(c)); }
}  // namespace libm

template <class T> PV_FN T add(T a, T b) {
  if constexpr (is_float<T>) return a + b; else return T(Wrap<T>(a) + Wrap<T>(b));
}
template <class T> PV_FN T sub(T a, T b) {
  if constexpr (is_float<T>) return a - b; else return T(Wrap<T>(a) - Wrap<T>(b));
}
template <class T> PV_FN T mul(T a, T b) {
  if constexpr (is_float<T>) return a * b; else return T(Wrap<T>(a) * Wrap<T>(b));
}
template <class T> PV_FN T neg(T a) { if constexpr (is_float<T>) return -a; else return T(-Wrap<T>(a)); }
template <class T> PV_FN T abs(T a) { if constexpr (is_float<T>) return libm::fabs(a); else return a < 0 ? neg(a) : a; }
template <class T> PV_FN T div(T a, T b) { return a / b; }
template <class T> PV_FN T reciprocal(T a) { return T(1) / a; }
template <class T> PV_FN T fma(T a, T b, T c) { return libm::fma(a, b, c); }
template <class T> PV_FN T sign(T a) { return T((a > 0) - (a < 0)); }
template <class T> PV_FN T maximum(T a, T b) { return a != a || a > b ? a : b; }
template <class T> PV_FN T minimum(T a, T b) { return a != a || a < b ? a : b; }

// Integer division never traps: by zero the result is 0 (eager raises an error), and the minimum integer by -1 wraps.
template <class T> PV_FN T truncdiv(T a, T b) {
  if constexpr (is_float<T>) return libm::trunc(a / b);
  else if (b == 0) return 0;
  else return std::is_signed_v<T> && b == T(-1) ? neg(a) : T(a / b);
}
template <class T> PV_FN T fmod(T a, T b) {
  if constexpr (is_float<T>) return libm::fmod(a, b);
  else return b == 0 || (std::is_signed_v<T> && b == T(-1)) ? T(0) : T(a % b);
}
template <class T> PV_FN T remainder(T a, T b) {
  const T rest = fmod(a, b);
  return rest != 0 && (b < 0) != (rest < 0) ? add(rest, b) : rest;
}
template <class T> PV_FN T floordiv(T a, T b) {
  if constexpr (is_float<T>) {
    if (b == 0) return a / b;
    const T rest = libm::fmod(a, b);
    T quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return libm::copysign(T(0), a / b);
    const T whole = libm::floor(quotient);
    return quotient - whole > T(0.5) ? whole + 1 : whole;
  } else {
    const T quotient = truncdiv(a, b), rest = fmod(a, b);
    return rest != 0 && (b < 0) != (rest < 0) ? sub(quotient, T(1)) : quotient;
  }
}
template <class T> PV_FN T pow(T a, T b) {
  if constexpr (is_float<T>) return libm::pow(a, b);
  else {
    if (b < 0) return a == 1 ? 1 : a == T(-1) ? (b & 1 ? T(-1) : T(1)) : 0;
    T result = 1;
    for (; b > 0; b = T(b >> 1), a = mul(a, a)) if (b & 1) result = mul(result, a);
    return result;
  }
}

template <class T> PV_FN bool eq(T a, T b) { return a == b; }
template <class T> PV_FN bool ne(T a, T b) { return a != b; }
template <class T> PV_FN bool lt(T a, T b) { return a < b; }
template <class T> PV_FN bool le(T a, T b) { return a <= b; }
template <class T> PV_FN bool gt(T a, T b) { return a > b; }
template <class T> PV_FN bool ge(T a, T b) { return a >= b; }
template <class T> PV_FN bool isnan(T a) { return a != a; }
template <class T> PV_FN bool isinf(T a) { return libm::fabs(a) == inf<T>; }

template <class T> PV_FN T bitwise_and(T a, T b) { return T(a & b); }
template <class T> PV_FN T bitwise_or(T a, T b) { return T(a | b); }
template <class T> PV_FN T bitwise_xor(T a, T b) { return T(a ^ b); }
template <class T> PV_FN T bitwise_not(T a) { if constexpr (std::is_same_v<T, bool>) return !a; else return T(~a); }

// A shift by a negative count, or by all bits or more, shifts everything out.
template <class T> PV_FN T shl(T a, T b) { return b < 0 || b >= T(8 * sizeof(T)) ? T(0) : T(Wrap<T>(a) << b); }
template <class T> PV_FN T shr(T a, T b) {
  constexpr T most = T(8 * sizeof(T) - std::is_signed_v<T>);
  return b < 0 || b >= most ? (std::is_signed_v<T> && a < 0 ? T(-1) : T(0)) : T(a >> b);
}
template <class T> PV_FN T where(bool c, T a, T b) { return c ? a : b; }

template <class T> PV_FN T round_bf16(T a) { return from_bits(uint32_t(bf16_bits(float(a))) << 16); }
template <class T> PV_FN T round_f16(T a) { return _cvtsh_ss(_cvtss_sh(float(a), _MM_FROUND_TO_NEAREST_INT)); }
template <class T> PV_FN T round(T a) { return libm::nearbyint(a); }
template <class T> PV_FN T rsqrt(T a) { return T(1) / libm::sqrt(a); }
template <class T> PV_FN T sigmoid(T a) { return T(1) / (T(1) + libm::exp(-a)); }

#define PV_SCALAR(name) template <class T> PV_FN T name(T a) { return libm::name(a); }
PV_SCALAR(floor) PV_SCALAR(ceil) PV_SCALAR(trunc) PV_SCALAR(sqrt)
PV_SCALAR(exp) PV_SCALAR(exp2) PV_SCALAR(expm1) PV_SCALAR(log) PV_SCALAR(log2) PV_SCALAR(log10) PV_SCALAR(log1p)
PV_SCALAR(sin) PV_SCALAR(cos) PV_SCALAR(tan) PV_SCALAR(asin) PV_SCALAR(acos) PV_SCALAR(atan)
PV_SCALAR(sinh) PV_SCALAR(cosh) PV_SCALAR(tanh) PV_SCALAR(asinh) PV_SCALAR(acosh) PV_SCALAR(atanh)
PV_SCALAR(erf) PV_SCALAR(erfc) PV_SCALAR(lgamma)
#undef PV_SCALAR
template <class T> PV_FN T atan2(T a, T b) { return libm::atan2(a, b); }
template <class T> PV_FN T hypot(T a, T b) { return libm::hypot(a, b); }

}  // namespace pv
