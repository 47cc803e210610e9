// Registers and vectors of them, for AVX-512 and for AVX2.
namespace pv {

#ifdef __AVX512F__
constexpr int REGISTER = 64;
#define PV_PS(name) _mm512_##name##_ps
#define PV_PD(name) _mm512_##name##_pd
#define PV_SLEEF_F(name, ulp) Sleef_##name##f16_##ulp
#define PV_SLEEF_D(name, ulp) Sleef_##name##d8_##ulp
using Floats = __m512;
using Doubles = __m512d;
#else
constexpr int REGISTER = 32;
#define PV_PS(name) _mm256_##name##_ps
#define PV_PD(name) _mm256_##name##_pd
#define PV_SLEEF_F(name, ulp) Sleef_##name##f8_##ulp
#define PV_SLEEF_D(name, ulp) Sleef_##name##d4_##ulp
using Floats = __m256;
using Doubles = __m256d;
#endif

// L lanes of T in one register.
template <class T, int L> struct RegisterOf {
  typedef T type __attribute__((vector_size(L * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(L * sizeof(T)), aligned(1), may_alias));
};
template <class T, int L> using Reg = typename RegisterOf<T, L>::type;

template <class T, int W> struct Vec {
  static constexpr int lanes = W * int(sizeof(T)) < REGISTER ? W : REGISTER / int(sizeof(T));  // in one register
  static constexpr int count = W / lanes;                                                      // of registers
  using reg = Reg<T, lanes>;
  reg r[count];
};

template <class V> struct LaneOf { using type = V; };
template <class T, int W> struct LaneOf<Vec<T, W>> { using type = T; };
template <class V> using Lane = typename LaneOf<V>::type;

// Calls f(K) for K = 0 .. N-1 with compile-time K and builds `Out{f(0), f(1), ...}`. Subscripts that are constants
// from the start keep the registers of a Vec in registers.
template <class Out, int N, class F> PV_FN Out build(F f) {
  return [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
    return Out{{f(std::integral_constant<int, int(K)>())...}};
  }(std::make_index_sequence<N>());
}

// Calls f(K) for K = 0 .. N-1 with compile-time K.
template <int N, class F> PV_FN void repeat(F f) {
  [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
    (f(std::integral_constant<int, int(K)>()), ...);
  }(std::make_index_sequence<N>());
}

// f on each register of vectors with the same lane type.
template <class To, class F, class T, int W, class... More>
PV_FN Vec<To, W> map(F f, const Vec<T, W>& a, const More&... more) {
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE { return f(a.r[K], more.r[K]...); });
}

// Lanes [FROM, FROM + N) of one register.
template <int FROM, int N, class T, int L> PV_FN Reg<T, N> piece(const Reg<T, L>& a) {
  if constexpr (N == L) {
    return a;
  } else {
    return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return __builtin_shufflevector(a, a, (FROM + K)...);
    }(std::make_integer_sequence<int, N>());
  }
}

template <class T, int L> PV_FN Reg<T, 2 * L> join(const Reg<T, L>& a, const Reg<T, L>& b) {
  return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
    return __builtin_shufflevector(a, b, K...);
  }(std::make_integer_sequence<int, 2 * L>());
}

// N lanes of To, from lane FROM on, converted by `f` in the largest groups that are one register on both sides.
template <class To, int FROM, int N, int STEP, class From, int W, class F>
PV_FN Reg<To, N> converted(const Vec<From, W>& a, F f) {
  constexpr int in = Vec<From, W>::lanes;
  if constexpr (N == STEP) {
    return f(piece<FROM % in, STEP, From, in>(a.r[FROM / in]));
  } else {
    return join<To, N / 2>(converted<To, FROM, N / 2, STEP>(a, f), converted<To, FROM + N / 2, N / 2, STEP>(a, f));
  }
}
template <class To, class From, int W, class F> PV_FN Vec<To, W> convert(const Vec<From, W>& a, F f) {
  constexpr int in = Vec<From, W>::lanes, out = Vec<To, W>::lanes, step = in < out ? in : out;
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE {
    return converted<To, decltype(K)::value * out, out, step>(a, f);
  });
}

// Any register as a full one, whose upper part is undefined; and the low parts of a full one.
#ifdef __AVX512F__
using Bits = __m512i;
#define PV_BITS(name) _mm512_##name
PV_FN Bits full(__m128i a) { return _mm512_castsi128_si512(a); }
PV_FN __m256i low_half(Bits a) { return _mm512_castsi512_si256(a); }
PV_FN __m128i low_128(Bits a) { return _mm512_castsi512_si128(a); }
#else
using Bits = __m256i;
#define PV_BITS(name) _mm256_##name
PV_FN Bits full(__m128i a) { return _mm256_castsi128_si256(a); }
PV_FN __m128i low_half(Bits a) { return _mm256_castsi256_si128(a); }
PV_FN __m128i low_128(Bits a) { return _mm256_castsi256_si128(a); }
#endif
template <class R> PV_FN Bits full(R a) {
  if constexpr (sizeof(R) == REGISTER) return (Bits)a;
#ifdef __AVX512F__
  else if constexpr (sizeof(R) == 32) return _mm512_castsi256_si512((__m256i)a);
#endif
  else if constexpr (sizeof(R) == 16) return full((__m128i)a);
  else { __m128i low = {}; std::memcpy(&low, &a, sizeof(R)); return full(low); }
}
template <class R> PV_FN R narrow(Bits a) {
  if constexpr (sizeof(R) == REGISTER) return (R)a;
  else if constexpr (sizeof(R) == REGISTER / 2) return (R)low_half(a);
  else if constexpr (sizeof(R) == 16) return (R)low_128(a);
  else { R low; const __m128i all = low_128(a); std::memcpy(&low, &all, sizeof(R)); return low; }
}

// Conversion of integer lanes to a wider or a narrower type; the wider ones fill a register. Compilers would convert
// bytes lane by lane.
#define PV_WIDER(from, to, a) \
  (std::is_signed_v<From> ? PV_BITS(cvtepi##from##_epi##to)(a) : PV_BITS(cvtepu##from##_epi##to)(a))
template <class To, class From> PV_FN Bits wider(Bits a) {
  if constexpr (sizeof(To) == 2) return PV_WIDER(8, 16, low_half(a));
  else if constexpr (sizeof(To) == 4 && sizeof(From) == 2) return PV_WIDER(16, 32, low_half(a));
  else if constexpr (sizeof(To) == 4) return PV_WIDER(8, 32, low_128(a));
  else if constexpr (sizeof(From) == 4) return PV_WIDER(32, 64, low_half(a));
  else if constexpr (sizeof(From) == 2) return PV_WIDER(16, 64, low_128(a));
  else return PV_WIDER(8, 64, low_128(a));
}
#ifdef __AVX512F__
template <class To, class From> PV_FN Bits narrower(Bits a) {
  if constexpr (sizeof(From) == 2) return full(_mm512_cvtepi16_epi8(a));
  else if constexpr (sizeof(From) == 4 && sizeof(To) == 2) return full(_mm512_cvtepi32_epi16(a));
  else if constexpr (sizeof(From) == 4) return full(_mm512_cvtepi32_epi8(a));
  else if constexpr (sizeof(To) == 4) return full(_mm512_cvtepi64_epi32(a));
  else if constexpr (sizeof(To) == 2) return full(_mm512_cvtepi64_epi16(a));
  else return full(_mm512_cvtepi64_epi8(a));
}
#else
// Compact the low bytes of the lanes of each half, then join both halves.
template <class To, class From> PV_FN Bits narrower(Bits a) {
  constexpr int size = sizeof(To), step = sizeof(From), half = 16 / step * size;
  const auto byte = [](int k) PV_INLINE { return char(k < half ? k / size * step + k % size : 0x80); };
  const __m128i low =
      _mm_setr_epi8(byte(0), byte(1), byte(2), byte(3), byte(4), byte(5), byte(6), byte(7), byte(8), byte(9),
                    byte(10), byte(11), byte(12), byte(13), byte(14), byte(15));
  const __m256i each = _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(low));
  if constexpr (half == 8) return _mm256_permute4x64_epi64(each, 0x08);
  else if constexpr (half == 4) return full(_mm_unpacklo_epi32(low_128(each), _mm256_extracti128_si256(each, 1)));
  else return full(_mm_unpacklo_epi16(low_128(each), _mm256_extracti128_si256(each, 1)));
}
#endif
template <class To, class From, int N> PV_FN Reg<To, N> converted_lanes(const Reg<From, N>& a) {
  constexpr bool whole = N * (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From)) == REGISTER;
  constexpr bool integers = !is_float<To> && !is_float<From> && whole;
  if constexpr (integers && sizeof(To) > sizeof(From)) return narrow<Reg<To, N>>(wider<To, From>(full(a)));
  else if constexpr (integers && sizeof(To) < sizeof(From)) return narrow<Reg<To, N>>(narrower<To, From>(full(a)));
  else return __builtin_convertvector(a, Reg<To, N>);
}
template <class To, class From, int W> PV_FN Vec<To, W> convert(const Vec<From, W>& a) {
  constexpr int in = Vec<From, W>::lanes, out = Vec<To, W>::lanes, step = in < out ? in : out;
  return convert<To>(a, [](auto x) PV_INLINE { return converted_lanes<To, From, step>(x); });
}

// The same bits as lanes of another type of the same size.
template <class To, class From, int W> PV_FN Vec<To, W> as(const Vec<From, W>& a) {
  return build<Vec<To, W>, Vec<To, W>::count>([&](auto K) PV_INLINE { return (typename Vec<To, W>::reg)a.r[K]; });
}

}  // namespace pv
