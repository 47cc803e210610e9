// The operators on vectors.
namespace pv {

// A register as unsigned lanes, on which integer arithmetic wraps around; floats stay floats.
template <class T, int L> PV_FN auto wrapping(Reg<T, L> a) {
  if constexpr (is_float<T>) return a;
  else return (Reg<std::make_unsigned_t<T>, L>)a;
}
#define PV_ARITHMETIC(name, OPERATOR)                                                                    \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    constexpr int L = Vec<T, W>::lanes;                                                                  \
    return map<T>([](auto x, auto y) PV_INLINE {                                                         \
      return (Reg<T, L>)(wrapping<T, L>(x) OPERATOR wrapping<T, L>(y));                                  \
    }, a, b);                                                                                            \
  }
PV_ARITHMETIC(add, +) PV_ARITHMETIC(sub, -) PV_ARITHMETIC(mul, *)
#undef PV_ARITHMETIC

#define PV_BITWISE(name, OPERATOR)                                                                       \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    return build<Vec<T, W>, Vec<T, W>::count>([&](auto K) PV_INLINE {                                    \
      return typename Vec<T, W>::reg(a.r[K] OPERATOR b.r[K]);                                            \
    });                                                                                                  \
  }
PV_BITWISE(bitwise_and, &) PV_BITWISE(bitwise_or, |) PV_BITWISE(bitwise_xor, ^)
#undef PV_BITWISE
template <class T, int W> PV_FN Vec<T, W> bitwise_not(const Vec<T, W>& a) {
  return build<Vec<T, W>, Vec<T, W>::count>([&](auto K) PV_INLINE { return typename Vec<T, W>::reg(~a.r[K]); });
}

template <class T, int W> PV_FN Vec<T, W> div(const Vec<T, W>& a, const Vec<T, W>& b) {
  return map<T>([](auto x, auto y) PV_INLINE { return x / y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> reciprocal(const Vec<T, W>& a) { return div(splat<W>(T(1)), a); }
template <class T, int W> PV_FN Vec<T, W> neg(const Vec<T, W>& a) {
  if constexpr (is_float<T>) return map<T>([](auto x) PV_INLINE { return -x; }, a);
  else return sub(splat<W>(T(0)), a);
}

template <class T, int W> PV_FN Vec<bool, W> eq(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_not(bitwise_xor(a, b)); else return compare<EQ>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> ne(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_xor(a, b); else return compare<NE>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> lt(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_and(bitwise_not(a), b); else return compare<LT>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> le(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_or(bitwise_not(a), b); else return compare<LE>(a, b);
}
template <class T, int W> PV_FN Vec<bool, W> gt(const Vec<T, W>& a, const Vec<T, W>& b) { return lt(b, a); }
template <class T, int W> PV_FN Vec<bool, W> ge(const Vec<T, W>& a, const Vec<T, W>& b) { return le(b, a); }
template <class T, int W> PV_FN Vec<bool, W> isnan(const Vec<T, W>& a) { return compare<NE>(a, a); }

// Whether all lanes are compile-time constants, and none is NaN.
template <class T, int W> PV_FN bool are_constant_numbers(const Vec<T, W>& a) {
  bool all = true;
#pragma GCC unroll 64
  for (int i = 0; i < W; i++) {
    const T lane = a.r[i / Vec<T, W>::lanes][i % Vec<T, W>::lanes];
    all = all && __builtin_constant_p(lane) && lane == lane;
  }
  return all;
}
// `choose` is the hardware's maximum or minimum of two registers: if one argument is NaN it returns the second, so only
// a NaN in the first needs care. A constant limit is not NaN.
template <class T, int W, class F> PV_FN Vec<T, W> propagate_nan(const Vec<T, W>& a, const Vec<T, W>& b, F choose) {
  if (are_constant_numbers(b)) return map<T>(choose, b, a);
  return where(isnan(a), a, map<T>(choose, a, b));
}
template <class T, int W> PV_FN Vec<T, W> maximum(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_or(a, b);
  else if constexpr (std::is_same_v<T, float>)
    return propagate_nan(a, b, [](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(max)(x, y); });
  else if constexpr (std::is_same_v<T, double>)
    return propagate_nan(a, b, [](auto x, auto y) PV_INLINE { return (decltype(x))PV_PD(max)(x, y); });
  else return map<T>([](auto x, auto y) PV_INLINE { return x > y ? x : y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> minimum(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (std::is_same_v<T, bool>) return bitwise_and(a, b);
  else if constexpr (std::is_same_v<T, float>)
    return propagate_nan(a, b, [](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(min)(x, y); });
  else if constexpr (std::is_same_v<T, double>)
    return propagate_nan(a, b, [](auto x, auto y) PV_INLINE { return (decltype(x))PV_PD(min)(x, y); });
  else return map<T>([](auto x, auto y) PV_INLINE { return x < y ? x : y; }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> abs(const Vec<T, W>& a) {
  if constexpr (is_float<T>) {
    using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    return as<T>(bitwise_and(as<U>(a), splat<W>(U(U(-1) >> 1))));
  } else {
    return std::is_signed_v<T> ? maximum(a, neg(a)) : a;
  }
}
// The magnitude of a with the sign of b.
template <class T, int W> PV_FN Vec<T, W> copysign(const Vec<T, W>& a, const Vec<T, W>& b) {
  using U = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const auto rest = splat<W>(U(U(-1) >> 1));
  return as<T>(bitwise_or(bitwise_and(as<U>(a), rest), bitwise_and(as<U>(b), bitwise_not(rest))));
}
template <class T, int W> PV_FN Vec<bool, W> isinf(const Vec<T, W>& a) { return eq(abs(a), splat<W>(inf<T>)); }
template <class T, int W> PV_FN Vec<T, W> sign(const Vec<T, W>& a) {
  const auto zero = splat<W>(T(0));
  const auto minus = std::is_signed_v<T> || is_float<T> ? splat<W>(T(-1)) : zero;
  return where(gt(a, zero), splat<W>(T(1)), where(lt(a, zero), minus, zero));
}

// An operator with an intrinsic F for floats and D for doubles.
#define PV_INTRINSIC(name, F, D)                                                                         \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a) {                                   \
    if constexpr (sizeof(T) == 4) return map<T>([](auto x) PV_INLINE { return (decltype(x))F; }, a);     \
    else return map<T>([](auto x) PV_INLINE { return (decltype(x))D; }, a);                              \
  }
PV_INTRINSIC(sqrt, PV_PS(sqrt)(x), PV_PD(sqrt)(x))
PV_INTRINSIC(floor, PV_PS(floor)(x), PV_PD(floor)(x))
PV_INTRINSIC(ceil, PV_PS(ceil)(x), PV_PD(ceil)(x))
#ifdef __AVX512F__
PV_INTRINSIC(trunc, _mm512_roundscale_ps(x, 11), _mm512_roundscale_pd(x, 11))
PV_INTRINSIC(round, _mm512_roundscale_ps(x, 8), _mm512_roundscale_pd(x, 8))
#else
PV_INTRINSIC(trunc, _mm256_round_ps(x, 11), _mm256_round_pd(x, 11))
PV_INTRINSIC(round, _mm256_round_ps(x, 8), _mm256_round_pd(x, 8))
#endif
// Sleef's functions come with PyTorch; `ulp` is the bound of their error, in tenths.
#define PV_SLEEF(name, symbol, ulp)                                                                      \
  extern "C" [[gnu::const]] Floats PV_SLEEF_F(symbol, ulp)(Floats);                                      \
  extern "C" [[gnu::const]] Doubles PV_SLEEF_D(symbol, ulp)(Doubles);                                    \
  PV_INTRINSIC(name, PV_SLEEF_F(symbol, ulp)(x), PV_SLEEF_D(symbol, ulp)(x))
PV_SLEEF(exp2, exp2, u10) PV_SLEEF(expm1, expm1, u10)
PV_SLEEF(log, log, u10) PV_SLEEF(log2, log2, u10) PV_SLEEF(log10, log10, u10) PV_SLEEF(log1p, log1p, u10)
PV_SLEEF(sin_sleef, sin, u10) PV_SLEEF(cos_sleef, cos, u10) PV_SLEEF(tan, tan, u10)
PV_SLEEF(asin, asin, u10) PV_SLEEF(acos, acos, u10) PV_SLEEF(atan, atan, u10)
PV_SLEEF(sinh_sleef, sinh, u10) PV_SLEEF(cosh_sleef, cosh, u10)
PV_SLEEF(asinh_sleef, asinh, u10) PV_SLEEF(acosh_sleef, acosh, u10) PV_SLEEF(atanh, atanh, u10)
PV_SLEEF(erfc, erfc, u15) PV_SLEEF(lgamma, lgamma, u10)
PV_SLEEF(exp_sleef, exp, u10) PV_SLEEF(tanh_sleef, tanh, u10) PV_SLEEF(erf_sleef, erf, u10)
#undef PV_SLEEF
#undef PV_INTRINSIC

#define PV_BINARY(name, ulp)                                                                             \
  extern "C" [[gnu::const]] Floats PV_SLEEF_F(name, ulp)(Floats, Floats);                                \
  extern "C" [[gnu::const]] Doubles PV_SLEEF_D(name, ulp)(Doubles, Doubles);                             \
  template <class T, int W> PV_FN Vec<T, W> name(const Vec<T, W>& a, const Vec<T, W>& b) {               \
    if constexpr (std::is_same_v<T, float>)                                                              \
      return map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_SLEEF_F(name, ulp)(x, y); }, a, b); \
    else if constexpr (std::is_same_v<T, double>)                                                        \
      return map<T>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_SLEEF_D(name, ulp)(x, y); }, a, b); \
    else return lanewise([](T x, T y) PV_INLINE { return name(x, y); }, a, b);                           \
  }
PV_BINARY(pow, u10) PV_BINARY(atan2, u10) PV_BINARY(hypot, u05)
#undef PV_BINARY

// Sleef's fmod returns NaN if the quotient is huge.
template <class T, int W> PV_FN Vec<T, W> fmod(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return fmod(x, y); }, a, b);
}

template <class T, int W> PV_FN Vec<T, W> fma(const Vec<T, W>& a, const Vec<T, W>& b, const Vec<T, W>& c) {
  if constexpr (sizeof(T) == 4)
    return map<T>([](auto x, auto y, auto z) PV_INLINE { return (decltype(x))PV_PS(fmadd)(x, y, z); }, a, b, c);
  else
    return map<T>([](auto x, auto y, auto z) PV_INLINE { return (decltype(x))PV_PD(fmadd)(x, y, z); }, a, b, c);
}
// Sleef squares the argument; where that would overflow, both functions are log(2x).
template <class T> constexpr T squares_overflow = sizeof(T) == 4 ? T(1e18) : T(1e150);
template <class T, int W> PV_FN Vec<T, W> acosh(const Vec<T, W>& a) {
  const auto large = add(log(a), splat<W>(T(0.69314718055994530942)));
  return where(gt(a, splat<W>(squares_overflow<T>)), large, acosh_sleef(a));
}
template <class T, int W> PV_FN Vec<T, W> asinh(const Vec<T, W>& a) {
  const auto size = abs(a), large = add(log(size), splat<W>(T(0.69314718055994530942)));
  return where(gt(size, splat<W>(squares_overflow<T>)), copysign(large, a), asinh_sleef(a));
}

// exp, tanh, erf, sin and cos of floats are inlined: models use them heavily, and a call would spill all registers. The
// polynomials are minimax fits; each function is within 2 ulp of the exact result.

// The polynomial c0 + c1*x + c2*x^2 + ...
template <int W> PV_FN Vec<float, W> polynomial(const Vec<float, W>&, float c) { return splat<W>(c); }
template <int W, class... C> PV_FN Vec<float, W> polynomial(const Vec<float, W>& x, float c, C... more) {
  return fma(polynomial(x, more...), x, splat<W>(c));
}

// x limited to [low, high]; NaN stays NaN.
template <int W> PV_FN Vec<float, W> clamp(const Vec<float, W>& x, float low, float high) {
  return map<float>([](auto x, auto low, auto high) PV_INLINE {
    return (decltype(x))PV_PS(max)(low, PV_PS(min)(high, x));
  }, x, splat<W>(low), splat<W>(high));
}

// a * 2^n for integers n in [-252, 254].
template <int W> PV_FN Vec<float, W> scale(const Vec<float, W>& a, const Vec<float, W>& n) {
#ifdef __AVX512F__
  return map<float>([](auto x, auto y) PV_INLINE { return (decltype(x))_mm512_scalef_ps(x, y); }, a, n);
#else
  const auto power = [](const Vec<int32_t, W>& k) PV_INLINE {
    return as<float>(map<int32_t>([](auto x) PV_INLINE { return (x + 127) << 23; }, k));
  };
  const auto whole = convert<int32_t>(n), half = map<int32_t>([](auto x) PV_INLINE { return x >> 1; }, whole);
  return mul(mul(a, power(half)), power(sub(whole, half)));
#endif
}

// e^x = 2^n * e^r with n = round(x / ln 2): returns n, and e^r - 1 = r + r^2 * q(r).
template <int W> struct ExpParts { Vec<float, W> n, less_one; };
template <int W> PV_FN ExpParts<W> exp_parts(const Vec<float, W>& x) {
  const auto n = round(mul(x, splat<W>(0x1.715476p+0f)));
  auto r = fma(n, splat<W>(-0x1.62e430p-1f), x);
  r = fma(n, splat<W>(0x1.05c610p-29f), r);
  const auto q = polynomial(r, 0.5f, 0.166665182f, 0.041666206f, 0.00836891774f, 0.00139505405f);
  return {n, fma(mul(r, r), q, r)};
}

template <class T, int W> PV_FN Vec<T, W> exp(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return exp_sleef(a);
  else {
    const auto parts = exp_parts(clamp(a, -104.0f, 89.0f));
    return scale(add(parts.less_one, splat<W>(1.0f)), parts.n);
  }
}

// Near 0 x + x^3 * p(x^2), elsewhere 1 - 2 / (e^2x + 1).
template <class T, int W> PV_FN Vec<T, W> tanh(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return tanh_sleef(a);
  else {
    const auto x = clamp(abs(a), 0.0f, 10.0f), square = mul(x, x), one = splat<W>(1.0f);
    const auto p = polynomial(square, -0.333333284f, 0.133331999f, -0.0539531f, 0.0217847303f, -0.00859511457f,
                              0.00307859434f, -0.000841137313f, 0.000121470744f);
    const auto near = fma(mul(x, square), p, x);
    const auto parts = exp_parts(add(x, x));
    const auto power = scale(add(parts.less_one, one), parts.n);
    const auto far = sub(one, div(splat<W>(2.0f), add(power, one)));
    return copysign(where(lt(x, one), near, far), a);
  }
}

// Entry k % 16 of a table in each lane.
template <int W> PV_FN Vec<float, W> lookup(const float (&table)[16], const Vec<int32_t, W>& k) {
#ifdef __AVX512F__
  const __m512 all = _mm512_load_ps(table);
  return convert<float>(k, [&](auto x) PV_INLINE { return (Reg<float, 16>)_mm512_permutexvar_ps((__m512i)x, all); });
#else
  const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
  return convert<float>(k, [&](auto x) PV_INLINE {
    const __m256 a = _mm256_permutevar8x32_ps(low, (__m256i)x), b = _mm256_permutevar8x32_ps(high, (__m256i)x);
    return (Reg<float, 8>)_mm256_blendv_ps(a, b, (__m256)_mm256_slli_epi32((__m256i)x, 28));
  });
#endif
}

// Around the centre c = k * ERF_STEP that is nearest to |x|, erf is erf(c) + t * q(t) with t = |x| - c; around 0 it is
// x + x * q(x). The step is chosen so that the erf(c) are close to floats. Row d of the table has the coefficients of
// t^d.
constexpr float ERF_STEP = 0x1.04b4p-2f;
alignas(64) constexpr float ERF[6][16] = {
    {0x0p+0f, 0x1.1ff016p-2f, 0x1.0e9c24p-1f, 0x1.7099bcp-1f, 0x1.b34bcep-1f, 0x1.db3a2p-1f, 0x1.f04188p-1f,
     0x1.f9ff4cp-1f, 0x1.fdf768p-1f, 0x1.ff6392p-1f, 0x1.ffd65ep-1f, 0x1.fff632p-1f, 0x1.fffdf6p-1f,
     0x1.ffffap-1f, 0x1.fffffp-1f, 0x1.fffffep-1f},
    {0x1.06eba8p-3f, 0x1.0ebc46p+0f, 0x1.bdc8f4p-1f, 0x1.4262c4p-1f, 0x1.9998ccp-2f, 0x1.c920aep-3f,
     0x1.c0252p-4f, 0x1.81ec1ap-5f, 0x1.23ee86p-6f, 0x1.83f724p-8f, 0x1.c4e71ap-10f, 0x1.d06d4p-12f,
     0x1.a2572ap-14f, 0x1.4b02fp-16f, 0x1.cc23p-19f, 0x1.18eea6p-21f},
    {0x0p+0f, -0x1.13b39ap-2f, -0x1.c5f85ep-2f, -0x1.ec7532p-2f, -0x1.a11e52p-2f, -0x1.22f582p-2f,
     -0x1.564ac6p-3f, -0x1.57e44p-4f, -0x1.29572p-5f, -0x1.bc6ffcp-7f, -0x1.200ep-8f, -0x1.43af7p-10f,
     -0x1.40b194p-12f, -0x1.10a042p-14f, -0x1.2e7048p-17f, -0x1.ec2704p-19f},
    {-0x1.81263ep-2f, -0x1.3a2e6p-2f, -0x1.1e2c3ep-3f, 0x1.1e9d5ap-5f, 0x1.254f02p-3f, 0x1.557454p-3f,
     0x1.11e22ep-3f, 0x1.58417ep-4f, 0x1.6306a2p-5f, 0x1.3327acp-6f, 0x1.c38424p-8f, 0x1.1c2b4cp-9f,
     0x1.33eb0ap-11f, 0x1.204e06p-13f, 0x1.d3ccaap-16f, 0x1.498b18p-18f},
    {0x0p+0f, 0x1.059bap-3f, 0x1.75550cp-3f, 0x1.2b92c4p-3f, 0x1.013eccp-4f, -0x1.612e42p-7f, -0x1.782172p-5f,
     -0x1.7e9b54p-5f, -0x1.044064p-5f, -0x1.17b414p-6f, -0x1.ebf42ap-8f, -0x1.7f5486p-9f, -0x1.8988bp-11f,
     -0x1.d5dec8p-13f, -0x1.ad9fa6p-13f, 0x1.3405fcp-14f},
    {0x1.cb84e6p-4f, 0x1.4176aap-4f, 0x1.372754p-8f, -0x1.c1715ep-5f, -0x1.17314p-4f, -0x1.698eacp-5f,
     -0x1.85cf76p-7f, 0x1.080cbep-7f, 0x1.aa83cep-7f, 0x1.449ea8p-7f, 0x1.612b1ep-8f, 0x1.2e0cf6p-9f,
     0x1.a65ef4p-11f, 0x1.ecd716p-13f, 0x1.e5d3a8p-15f, 0x1.97e5fp-17f},
};
template <class T, int W> PV_FN Vec<T, W> erf(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return erf_sleef(a);
  else {
    const auto x = clamp(abs(a), 0.0f, 3.935f);  // from 3.926 on it is 1
    const auto centre = round(mul(x, splat<W>(1 / ERF_STEP)));
    const auto t = fma(centre, splat<W>(-ERF_STEP), x);
    const auto k = convert<int32_t>(centre);
    auto q = lookup(ERF[5], k);
    q = fma(q, t, lookup(ERF[4], k));
    q = fma(q, t, lookup(ERF[3], k));
    q = fma(q, t, lookup(ERF[2], k));
    q = fma(q, t, lookup(ERF[1], k));
    const auto base = where(eq(centre, splat<W>(0.0f)), t, lookup(ERF[0], k));
    return copysign(fma(q, t, base), a);
  }
}

// |x| = q * pi/2 + r with q = round(|x| / (pi/2)) and pi/2 as the sum of three floats (Cody and Waite 1980): the first
// difference is exact up to the limit; the rounding error of the second one (Knuth's two-sum) is added to `low`, the
// low part of r. The quadrant q determines whether the result is sin or cos of r, and its sign.
constexpr float MAX_REDUCED = 30000;
template <int W> struct ReducedSinCos { Vec<int32_t, W> quadrant; Vec<float, W> sine, cosine; };
template <int W> PV_FN ReducedSinCos<W> reduced_sin_cos(const Vec<float, W>& size) {
  const auto q = round(mul(size, splat<W>(0x1.45f306p-1f))), second = splat<W>(0x1.777a5cp-25f);
  const auto first = fma(q, splat<W>(-0x1.921fb6p+0f), size);
  const auto more = mul(q, second), r = add(first, more), took = sub(r, first);
  const auto lost = add(sub(first, sub(r, took)), sub(more, took));
  const auto low = fma(q, splat<W>(0x1.ee59dap-50f), add(lost, fma(q, second, neg(more))));
  const auto square = mul(r, r);
  const auto s = polynomial(square, -0.166666552f, 0.0083321603f, -0.000195152155f);
  const auto c = polynomial(square, -0.5f, 0.0416666456f, -0.00138873153f, 2.4433080e-05f);
  const auto sine = add(r, fma(mul(r, square), s, low));
  return {convert<int32_t>(q), sine, add(fma(square, c, mul(neg(r), low)), splat<W>(1.0f))};
}
// One of two values by the parity of the quadrant, negated in the third and the fourth.
template <int W>
PV_FN Vec<float, W> by_quadrant(const Vec<int32_t, W>& n, const Vec<float, W>& even, const Vec<float, W>& odd) {
  const auto chosen = where(compare<EQ>(bitwise_and(n, splat<W>(1)), splat<W>(0)), even, odd);
  const auto minus = map<int32_t>([](auto x) PV_INLINE { return x >> 1 << 31; }, n);
  return as<float>(bitwise_xor(as<int32_t>(chosen), minus));
}
// A rarely executed call of f, out of line so that the common path spills no registers.
template <class F, class V> [[gnu::cold, gnu::noinline]] inline V cold_call(F f, const V& a) { return f(a); }
template <class T, int W> PV_FN Vec<T, W> sin(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return sin_sleef(a);
  else {
    const auto size = abs(a);
    if (__builtin_expect(any(gt(size, splat<W>(MAX_REDUCED))), 0)) {
      return cold_call([](const auto& x) PV_INLINE { return sin_sleef(x); }, a);
    }
    const auto parts = reduced_sin_cos(size);
    const auto minus = bitwise_and(as<int32_t>(a), splat<W>(INT32_MIN));
    return as<float>(bitwise_xor(as<int32_t>(by_quadrant(parts.quadrant, parts.sine, parts.cosine)), minus));
  }
}
template <class T, int W> PV_FN Vec<T, W> cos(const Vec<T, W>& a) {
  if constexpr (sizeof(T) == 8) return cos_sleef(a);
  else {
    const auto size = abs(a);
    if (__builtin_expect(any(gt(size, splat<W>(MAX_REDUCED))), 0)) {
      return cold_call([](const auto& x) PV_INLINE { return cos_sleef(x); }, a);
    }
    const auto parts = reduced_sin_cos(size);
    return by_quadrant(add(parts.quadrant, splat<W>(1)), parts.sine, parts.cosine);
  }
}

// Sleef's sinh and cosh overflow a little early: where e^x does, e^x / 2 = e^(x/2) / 2 * e^(x/2) may still be finite.
template <class T> constexpr T exp_overflows = sizeof(T) == 4 ? T(88) : T(709);
template <class T, int W> PV_FN Vec<T, W> half_exp(const Vec<T, W>& a) {
  const auto half = splat<W>(T(0.5)), root = exp(mul(a, half));
  return mul(mul(root, half), root);
}
template <class T, int W> PV_FN Vec<T, W> cosh(const Vec<T, W>& a) {
  const auto size = abs(a);
  return where(gt(size, splat<W>(exp_overflows<T>)), half_exp(size), cosh_sleef(a));
}
template <class T, int W> PV_FN Vec<T, W> sinh(const Vec<T, W>& a) {
  const auto size = abs(a);
  return where(gt(size, splat<W>(exp_overflows<T>)), copysign(half_exp(size), a), sinh_sleef(a));
}

template <class T, int W> PV_FN Vec<T, W> rsqrt(const Vec<T, W>& a) { return reciprocal(sqrt(a)); }
template <class T, int W> PV_FN Vec<T, W> sigmoid(const Vec<T, W>& a) {
  const auto one = splat<W>(T(1));
  return div(one, add(one, exp(neg(a))));
}

template <class T, int W> PV_FN Vec<T, W> truncdiv(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (is_float<T>) return trunc(div(a, b));
  else return lanewise([](T x, T y) PV_INLINE { return truncdiv(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> remainder(const Vec<T, W>& a, const Vec<T, W>& b) {
  if constexpr (is_float<T>) {
    const auto zero = splat<W>(T(0)), rest = fmod(a, b);
    const auto wrong = bitwise_and(ne(rest, zero), ne(lt(b, zero), lt(rest, zero)));
    return where(wrong, add(rest, b), rest);
  } else {
    return lanewise([](T x, T y) PV_INLINE { return remainder(x, y); }, a, b);
  }
}
template <class T, int W> PV_FN Vec<T, W> floordiv(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return floordiv(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> shl(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return shl(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> shr(const Vec<T, W>& a, const Vec<T, W>& b) {
  return lanewise([](T x, T y) PV_INLINE { return shr(x, y); }, a, b);
}
template <class T, int W> PV_FN Vec<T, W> round_bf16(const Vec<T, W>& a) {
  return cast<T>(widen<bf16, W>(shrink<bf16, W>(cast<float>(a))));
}
template <class T, int W> PV_FN Vec<T, W> round_f16(const Vec<T, W>& a) {
  return cast<T>(widen<f16, W>(shrink<f16, W>(cast<float>(a))));
}

}  // namespace pv
