// Masks, one boolean per lane, for AVX-512 and for AVX2; and their operators.
namespace pv {

#ifdef __AVX512F__

// A mask has one bit per lane, in groups of 16 lanes so that 32-bit lanes need no shifting.
template <int W> struct Vec<bool, W> {
  static constexpr int count = W / 16;
  using reg = uint16_t;
  reg r[count];
};

// Masks are joined by instructions that ignore unused bits, not by shifts: GCC 12 spills a mask of 8 bits as a byte and
// reloads 16 bits, assuming that the others are zero.
PV_FN uint16_t join_masks(uint8_t low, uint8_t high) { return _mm512_kunpackb(high, low); }
PV_FN uint32_t join_masks(uint16_t low, uint16_t high) { return _mm512_kunpackw(high, low); }
PV_FN uint64_t join_masks(uint32_t low, uint32_t high) { return _mm512_kunpackd(high, low); }

// The L bits for register K of a vector with L lanes per register, and back.
template <int K, int L, int W> PV_FN uint64_t bits_of(const Vec<bool, W>& m) {
  if constexpr (L == 64) {
    return join_masks(join_masks(m.r[4 * K], m.r[4 * K + 1]), join_masks(m.r[4 * K + 2], m.r[4 * K + 3]));
  } else if constexpr (L == 32) {
    return join_masks(m.r[2 * K], m.r[2 * K + 1]);
  } else {
    return (m.r[K * L / 16] >> (K * L % 16)) & ((1u << L) - 1);
  }
}
template <int L, int W, class F> PV_FN Vec<bool, W> from_bits(F bits) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto G) PV_INLINE {
    constexpr int g = decltype(G)::value;
    if constexpr (L >= 16) {
      return uint16_t(bits(std::integral_constant<int, g * 16 / L>()) >> (g * 16 % L));
    } else {
      static_assert(L == 8);
      return join_masks(uint8_t(bits(std::integral_constant<int, 2 * g>())),
                        uint8_t(bits(std::integral_constant<int, 2 * g + 1>())));
    }
  });
}

enum Predicate { EQ = 0, LT = 1, LE = 2, NE = 4, NOT_LE = 6 };

template <Predicate P, class T> PV_FN uint64_t compare_integers(__m512i a, __m512i b) {
  if constexpr (std::is_signed_v<T>) {
    if constexpr (sizeof(T) == 8) return _mm512_cmp_epi64_mask(a, b, P);
    else if constexpr (sizeof(T) == 4) return _mm512_cmp_epi32_mask(a, b, P);
    else if constexpr (sizeof(T) == 2) return _mm512_cmp_epi16_mask(a, b, P);
    else return _mm512_cmp_epi8_mask(a, b, P);
  } else {
    if constexpr (sizeof(T) == 8) return _mm512_cmp_epu64_mask(a, b, P);
    else if constexpr (sizeof(T) == 4) return _mm512_cmp_epu32_mask(a, b, P);
    else if constexpr (sizeof(T) == 2) return _mm512_cmp_epu16_mask(a, b, P);
    else return _mm512_cmp_epu8_mask(a, b, P);
  }
}

template <Predicate P, class T, int W> PV_FN Vec<bool, W> compare(const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  return from_bits<V::lanes, W>([&](auto K) PV_INLINE -> uint64_t {
    constexpr int k = decltype(K)::value;
    constexpr int quiet = P == LT ? _CMP_LT_OQ : P == LE ? _CMP_LE_OQ : P == NE ? _CMP_NEQ_UQ
                          : P == NOT_LE ? _CMP_NLE_UQ : _CMP_EQ_OQ;
    constexpr uint64_t used = V::lanes == 64 ? ~0ull : (1ull << (V::lanes % 64)) - 1;
    if constexpr (std::is_same_v<T, float>) return _mm512_cmp_ps_mask((__m512)a.r[k], (__m512)b.r[k], quiet);
    else if constexpr (std::is_same_v<T, double>) return _mm512_cmp_pd_mask((__m512d)a.r[k], (__m512d)b.r[k], quiet);
    else return compare_integers<P, T>(full(a.r[k]), full(b.r[k])) & used;
  });
}

template <class T, int W>
PV_FN Vec<T, W> where(const Vec<bool, W>& m, const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto K) PV_INLINE { return uint16_t((m.r[K] & a.r[K]) | (~m.r[K] & b.r[K])); });
  } else {
    return build<V, V::count>([&](auto K) PV_INLINE {
      constexpr int k = decltype(K)::value;
      const uint64_t bits = bits_of<k, V::lanes>(m);
      using R = typename V::reg;
      if constexpr (std::is_same_v<T, float>) return (R)_mm512_mask_blend_ps(bits, (__m512)b.r[k], (__m512)a.r[k]);
      else if constexpr (std::is_same_v<T, double>)
        return (R)_mm512_mask_blend_pd(bits, (__m512d)b.r[k], (__m512d)a.r[k]);
      else if constexpr (sizeof(T) == 8) return narrow<R>(_mm512_mask_blend_epi64(bits, full(b.r[k]), full(a.r[k])));
      else if constexpr (sizeof(T) == 4) return narrow<R>(_mm512_mask_blend_epi32(bits, full(b.r[k]), full(a.r[k])));
      else if constexpr (sizeof(T) == 2) return narrow<R>(_mm512_mask_blend_epi16(bits, full(b.r[k]), full(a.r[k])));
      else return narrow<R>(_mm512_mask_blend_epi8(bits, full(b.r[k]), full(a.r[k])));
    });
  }
}

template <int W> PV_FN bool any(const Vec<bool, W>& m) {
  uint16_t all = 0;
  for (int g = 0; g < Vec<bool, W>::count; g++) all |= m.r[g];
  return all != 0;
}

// Lanes [0, n) of W.
template <int W> PV_FN Vec<bool, W> first_lanes(int64_t n) {
  const uint64_t bits = _bzhi_u64(~0ull, uint32_t(n));
  return from_bits<64, W>([&](auto) PV_INLINE { return bits; });
}

// The lanes of one register whose bits are set.
template <class R, class T> PV_FN R load_lanes(const T* p, uint64_t bits) {
  if constexpr (sizeof(T) == 8) return narrow<R>(_mm512_maskz_loadu_epi64(bits, p));
  else if constexpr (sizeof(T) == 4) return narrow<R>(_mm512_maskz_loadu_epi32(bits, p));
  else if constexpr (sizeof(T) == 2) return narrow<R>(_mm512_maskz_loadu_epi16(bits, p));
  else return narrow<R>(_mm512_maskz_loadu_epi8(bits, p));
}
template <class R, class T> PV_FN void store_lanes(T* p, R a, uint64_t bits) {
  if constexpr (sizeof(T) == 8) _mm512_mask_storeu_epi64(p, bits, full(a));
  else if constexpr (sizeof(T) == 4) _mm512_mask_storeu_epi32(p, bits, full(a));
  else if constexpr (sizeof(T) == 2) _mm512_mask_storeu_epi16(p, bits, full(a));
  else _mm512_mask_storeu_epi8(p, bits, full(a));
}

// An empty mask branches: for `cat`, `pad` and `roll` the mask of one side is empty nearly everywhere, and an
// instruction without active lanes takes hundreds of cycles if its address is not readable.
template <class T, int W> PV_FN Vec<T, W> load_masked(const T* p, const Vec<bool, W>& m) {
  using V = Vec<T, W>;
  return build<V, V::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value;
    const uint64_t bits = bits_of<k, V::lanes>(m);
    using R = typename V::reg;
    return bits == 0 ? R() : load_lanes<R>(p + k * V::lanes, bits);
  });
}
template <class T, int W> PV_FN void store_masked(T* p, const Vec<T, W>& a, const Vec<bool, W>& m) {
  using V = Vec<T, W>;
  repeat<V::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value;
    store_lanes(p + k * V::lanes, a.r[k], bits_of<k, V::lanes>(m));
  });
}
#else

// A mask is 0 or -1 per lane, with lanes as wide as a float.
template <int W> struct Vec<bool, W> {
  static constexpr int count = Vec<int32_t, W>::count;
  using reg = typename Vec<int32_t, W>::reg;
  reg r[count];
};
template <int W> PV_FN Vec<int32_t, W> int_lanes(const Vec<bool, W>& m) {
  return build<Vec<int32_t, W>, Vec<int32_t, W>::count>([&](auto K) PV_INLINE { return m.r[K]; });
}

enum Predicate { EQ, LT, LE, NE, NOT_LE };
template <size_t SIZE> using IntOfSize = std::conditional_t<
    SIZE == 8, int64_t, std::conditional_t<SIZE == 4, int32_t, std::conditional_t<SIZE == 2, int16_t, int8_t>>>;

template <Predicate P, class T, int W> PV_FN Vec<bool, W> compare(const Vec<T, W>& a, const Vec<T, W>& b) {
  using I = IntOfSize<sizeof(T)>;
  const auto wide = build<Vec<I, W>, Vec<I, W>::count>([&](auto K) PV_INLINE {
    using R = typename Vec<I, W>::reg;
    if constexpr (P == EQ) return (R)(a.r[K] == b.r[K]);
    else if constexpr (P == LT) return (R)(a.r[K] < b.r[K]);
    else if constexpr (P == LE) return (R)(a.r[K] <= b.r[K]);
    else if constexpr (P == NOT_LE) return ~(R)(a.r[K] <= b.r[K]);
    else return (R)(a.r[K] != b.r[K]);
  });
  const auto lanes = convert<int32_t>(wide);
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE { return lanes.r[K]; });
}

template <class T, int W>
PV_FN Vec<T, W> where(const Vec<bool, W>& m, const Vec<T, W>& a, const Vec<T, W>& b) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto K) PV_INLINE { return (m.r[K] & a.r[K]) | (~m.r[K] & b.r[K]); });
  } else {
    const auto wide = convert<IntOfSize<sizeof(T)>>(int_lanes(m));
    return build<V, V::count>([&](auto K) PV_INLINE { return wide.r[K] ? a.r[K] : b.r[K]; });
  }
}

template <int W> PV_FN bool any(const Vec<bool, W>& m) {
  auto all = m.r[0];
  for (int k = 1; k < Vec<bool, W>::count; k++) all |= m.r[k];
  return !_mm256_testz_si256((__m256i)all, (__m256i)all);
}

template <int W> PV_FN bool all(const Vec<bool, W>& m) {
  auto both = m.r[0];
  for (int k = 1; k < Vec<bool, W>::count; k++) both &= m.r[k];
  return _mm256_testc_si256((__m256i)both, _mm256_set1_epi32(-1));
}

// Lanes [0, n) of W.
template <int W> PV_FN Vec<bool, W> first_lanes(int64_t n) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE {
    constexpr int k = decltype(K)::value * 8;
    const int first = int(n) - k;
    return (typename Vec<bool, W>::reg){0, 1, 2, 3, 4, 5, 6, 7} < first;
  });
}

// A mask of one register, with lanes of 4 or 8 bytes, from bits. R: as wide as a register.
template <class R, class T> PV_FN __m256i lanes_of_bits(uint64_t bits) {
  return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
    return (__m256i)Reg<IntOfSize<sizeof(T)>, int(sizeof(R) / sizeof(T))>{-IntOfSize<sizeof(T)>(bits >> K & 1)...};
  }(std::make_integer_sequence<int, int(sizeof(R) / sizeof(T))>());
}
template <class R, class T> PV_FN R load_chosen(const T* p, __m256i on) {
  if constexpr (sizeof(T) == 8) return (R)_mm256_maskload_epi64((const long long*)p, on);
  else return (R)_mm256_maskload_epi32((const int*)p, on);
}
template <class R, class T> PV_FN R load_lanes(const T* p, uint64_t bits) {
  return load_chosen<R>(p, lanes_of_bits<R, T>(bits));
}
template <class R, class T> PV_FN void store_lanes(T* p, R a, uint64_t bits) {
  if constexpr (sizeof(T) == 8) _mm256_maskstore_epi64((long long*)p, lanes_of_bits<R, T>(bits), (__m256i)a);
  else _mm256_maskstore_epi32((int*)p, lanes_of_bits<R, T>(bits), (__m256i)a);
}

// A mask with all or no lanes set branches: `cat` and `pad` load from one side only nearly everywhere. Lanes that are
// off in a mixed mask are not read, since they may be outside of the tensor.
template <class T, int W> PV_FN Vec<T, W> load_masked(const T* p, const Vec<bool, W>& m) {
  using V = Vec<T, W>;
  V result;
  if (all(m)) {
    std::memcpy(result.r, p, sizeof(T) * W);
  } else if (!any(m)) {
    result = build<V, V::count>([&](auto) PV_INLINE { return typename V::reg(); });
  } else if constexpr (sizeof(T) >= 4) {
    const auto wide = convert<IntOfSize<sizeof(T)>>(int_lanes(m));
    result = build<V, V::count>([&](auto K) PV_INLINE {
      return load_chosen<typename V::reg>(p + decltype(K)::value * V::lanes, (__m256i)wide.r[K]);
    });
  } else {
    alignas(32) int32_t on[W];
    alignas(32) T lanes[W];
    std::memcpy(on, m.r, sizeof on);
    for (int k = 0; k < W; k++) lanes[k] = on[k] ? p[k] : T();
    std::memcpy(result.r, lanes, sizeof lanes);
  }
  return result;
}
template <class T, int W> PV_FN void store_masked(T* p, const Vec<T, W>& a, const Vec<bool, W>& m) {
  alignas(32) int32_t on[W];
  alignas(32) T lanes[W];
  std::memcpy(on, m.r, sizeof on);
  std::memcpy(lanes, a.r, sizeof lanes);
  for (int k = 0; k < W; k++)
    if (on[k]) p[k] = lanes[k];
}

#endif

}  // namespace pv
