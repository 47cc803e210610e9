// Memory: loads, stores, strided and indirect access, updates in place, transposed tiles.
namespace pv {

// The type of an element in memory (Raw), and the type it is computed in (Value).
template <class T> struct Element { using raw = T; using value = T; };
template <> struct Element<bf16> { using raw = uint16_t; using value = float; };
template <> struct Element<f16> { using raw = uint16_t; using value = float; };
template <> struct Element<bool> { using raw = uint8_t; using value = bool; };
// An integer of one byte, cast to E, float or narrower, when it is loaded.
template <class Integer, class E> struct Cast { Integer raw; };
template <class Integer, class E> struct Element<Cast<Integer, E>> { using raw = Integer; using value = float; };
template <class T> using Raw = typename Element<T>::raw;
template <class T> using Value = typename Element<T>::value;

PV_FN float from_bits(uint32_t bits) { float a; std::memcpy(&a, &bits, 4); return a; }
PV_FN uint32_t to_bits(float a) { uint32_t bits; std::memcpy(&bits, &a, 4); return bits; }

// The bf16 nearest to a float, ties to even; NaN stays NaN.
PV_FN uint16_t bf16_bits(float a) {
  const uint32_t bits = to_bits(a);
  return a != a ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> PV_FN Value<T> widen(Raw<T> a) {
  if constexpr (std::is_same_v<T, bf16>) return from_bits(uint32_t(a) << 16);
  else if constexpr (std::is_same_v<T, f16>) return _cvtsh_ss(a);
  else if constexpr (std::is_same_v<T, bool>) return a != 0;
  else return Value<T>(a);
}
template <class T> PV_FN Raw<T> shrink(Value<T> a) {
  if constexpr (std::is_same_v<T, bf16>) return bf16_bits(a);
  else if constexpr (std::is_same_v<T, f16>) return _cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT);
  else return a;
}

template <class T, int W> PV_FN Vec<Value<T>, W> widen(const Vec<Raw<T>, W>& a) {
  if constexpr (std::is_same_v<T, bf16>) {
    return as<float>(map<uint32_t>([](auto x) PV_INLINE { return x << 16; }, convert<uint32_t>(a)));
  } else if constexpr (std::is_same_v<T, f16>) {
#ifdef __AVX512F__
    return convert<float>(a, [](auto x) PV_INLINE { return (Reg<float, 16>)_mm512_cvtph_ps((__m256i)x); });
#else
    return convert<float>(a, [](auto x) PV_INLINE { return (Reg<float, 8>)_mm256_cvtph_ps((__m128i)x); });
#endif
  } else if constexpr (std::is_same_v<T, bool>) {
    return compare<NE>(a, splat<W>(uint8_t(0)));
  } else if constexpr (!std::is_same_v<Raw<T>, Value<T>>) {
    return convert<float>(convert<int32_t>(a));
  } else {
    return a;
  }
}
// `bf16_bits` of each lane.
template <int W> PV_FN Vec<uint16_t, W> shrink_bf16(const Vec<float, W>& a) {
  const auto rounded = map<uint32_t>([](auto x) PV_INLINE { return (x + 0x7fff + (x >> 16 & 1)) >> 16; },
                                     as<uint32_t>(a));
  return convert<uint16_t>(where(compare<NE>(a, a), splat<W>(uint32_t(0x7fc0)), rounded));
}
#ifdef __AVX512BF16__
[[gnu::cold, gnu::noinline]] inline Reg<uint16_t, 16> shrink_special(Reg<float, 16> x) {
  return shrink_bf16(Vec<float, 16>{{x}}).r[0];
}
// The instruction flushes subnormal numbers to zero and preserves the payload of NaNs, unlike `bf16_bits`.
PV_FN Reg<uint16_t, 16> shrink_register(Reg<float, 16> x) {
  constexpr int SUBNORMAL_OR_NAN = 0x20 | 0x80 | 0x01;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)x, SUBNORMAL_OR_NAN), 0)) return shrink_special(x);
  return (Reg<uint16_t, 16>)_mm512_cvtneps_pbh((__m512)x);
}
#endif

template <class T, int W> PV_FN Vec<Raw<T>, W> shrink(const Vec<Value<T>, W>& a) {
  if constexpr (std::is_same_v<T, bf16>) {
#ifdef __AVX512BF16__
    return convert<uint16_t>(a, [](auto x) PV_INLINE { return shrink_register(x); });
#else
    return shrink_bf16(a);
#endif
  } else if constexpr (std::is_same_v<T, f16>) {
#ifdef __AVX512F__
    return convert<uint16_t>(a, [](auto x) PV_INLINE { return (Reg<uint16_t, 16>)_mm512_cvtps_ph((__m512)x, 0); });
#else
    return convert<uint16_t>(a, [](auto x) PV_INLINE { return (Reg<uint16_t, 8>)_mm256_cvtps_ph((__m256)x, 0); });
#endif
  } else if constexpr (std::is_same_v<T, bool>) {
    return where(a, splat<W>(uint8_t(1)), splat<W>(uint8_t(0)));
  } else {
    return a;
  }
}

template <class T> PV_FN Value<T> load(const T* p) { return widen<T>(*(const Raw<T>*)p); }
template <class T> PV_FN Value<T> load(const T* p, bool mask, Value<T> other) { return mask ? load(p) : other; }
template <class T> PV_FN void store(T* p, Value<T> a) { *(Raw<T>*)p = shrink<T>(a); }

template <class T, int W> PV_FN Vec<Value<T>, W> load(const T* p, All<W>) {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  return widen<T, W>(build<V, V::count>([&](auto K) PV_INLINE {
    return (typename V::reg)*(const U*)((const Raw<T>*)p + decltype(K)::value * V::lanes);
  }));
}
template <class T, int W> PV_FN Vec<Value<T>, W> load(const T* p, const Some<W>& n) {
  return widen<T, W>(load_masked((const Raw<T>*)p, n.mask));
}
template <int W> PV_FN Vec<bool, W> both(const Vec<bool, W>& m, All<W>) { return m; }
template <int W> PV_FN Vec<bool, W> both(const Vec<bool, W>& m, const Some<W>& n) {
  return build<Vec<bool, W>, Vec<bool, W>::count>([&](auto K) PV_INLINE {
    return typename Vec<bool, W>::reg(m.r[K] & n.mask.r[K]);
  });
}
template <class T, int W, class N>
PV_FN Vec<Value<T>, W> load(const T* p, const N& n, const Vec<bool, W>& mask, Value<T> other) {
  return where(mask, widen<T, W>(load_masked((const Raw<T>*)p, both(mask, n))), splat<W>(other));
}

template <class T, int W> PV_FN void store(T* p, const Vec<Value<T>, W>& a, All<W>) {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  const V raw = shrink<T, W>(a);
  repeat<V::count>([&](auto K) PV_INLINE { *(U*)((Raw<T>*)p + decltype(K)::value * V::lanes) = raw.r[K]; });
}
template <class T, int W> PV_FN void store(T* p, const Vec<Value<T>, W>& a, const Some<W>& n) {
  store_masked((Raw<T>*)p, shrink<T, W>(a), n.mask);
}

// A non-temporal store to an aligned address; `stream_end` orders it before later stores.
template <class R> PV_FN void stream_aligned(void* p, R a) {
  if constexpr (sizeof(R) == 32) _mm256_stream_si256((__m256i*)p, (__m256i)a);
  else if constexpr (sizeof(R) == 16) _mm_stream_si128((__m128i*)p, (__m128i)a);
#ifdef __AVX512F__
  else if constexpr (sizeof(R) == 64) _mm512_stream_si512((__m512i*)p, (__m512i)a);
#endif
  else std::memcpy(p, &a, sizeof(R));
}
// A store to any address, non-temporal if it is aligned.
template <class R> PV_FN void stream_register(void* p, R a) {
  if (uintptr_t(p) % sizeof(R) != 0) std::memcpy(p, &a, sizeof(R));
  else stream_aligned(p, a);
}
template <class T, int W> PV_FN void stream(T* p, const Vec<Value<T>, W>& a, All<W>) {
  using V = Vec<Raw<T>, W>;
  const V raw = shrink<T, W>(a);
  repeat<V::count>([&](auto K) PV_INLINE { stream_register((Raw<T>*)p + decltype(K)::value * V::lanes, raw.r[K]); });
}
template <class T, int W> PV_FN void stream(T* p, const Vec<Value<T>, W>& a, const Some<W>& n) { store<T>(p, a, n); }
PV_FN void stream_end() { _mm_sfence(); }

// Element `at(k)` of p in lane k: strided and indirect access, one lane at a time.
template <class T, class N, int W, class F> PV_FN Vec<Value<T>, W> gather_lanes(const T* p, const N& n, All<W>, F at) {
  Lanes<Raw<T>, W> out = {};
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) out.lane[k] = ((const Raw<T>*)p)[at(k)];
  return widen<T, W>(from_lanes(out));
}
template <int W, class T, class N, class F> PV_FN Vec<Value<T>, W> gather(const T* p, const N& n, F at) {
  return gather_lanes(p, n, All<W>(), at);
}
template <int W, class T, class N, class F>
PV_FN Vec<Value<T>, W> gather(const T* p, const N& n, F at, const Vec<bool, W>& mask, Value<T> other) {
  Lanes<Value<T>, W> out = {};
  const auto on = lanes(mask);
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) out.lane[k] = on[k] ? load(p + at(k)) : other;
  return from_lanes(out);
}
// The element at p in each lane that is on, else `other`; it is read only if some lane is on.
template <int W, class T, class N>
PV_FN Vec<Value<T>, W> load_one(const T* p, const N& n, const Vec<bool, W>& mask, Value<T> other) {
  return where(mask, splat<W>(any(both(mask, n)) ? load(p) : other), splat<W>(other));
}

// The bits of the first n lanes; none if n is negative.
PV_FN uint64_t bits_below(int64_t n) { return n < 0 ? 0 : _bzhi_u64(~0ull, uint32_t(n < 64 ? n : 64)); }
// Element at[k] of p, which has `numel` elements, in lane k. If all are within four registers from the element of the
// first lane on, as when an image is resized, these registers are loaded and permuted.
template <class T, int W, class N>
PV_FN Vec<Value<T>, W> gather_from(const T* p, const N& n, const Vec<int64_t, W>& at, int64_t numel) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 4 && W == 16) {
    const __m512i first = _mm512_broadcastq_epi64(_mm512_castsi512_si128((__m512i)at.r[0]));
    const __m512i low = _mm512_sub_epi64((__m512i)at.r[0], first), high = _mm512_sub_epi64((__m512i)at.r[1], first);
    const __m512i span = _mm512_set1_epi64(64);
    const uint32_t near = _mm512_kunpackb(_mm512_cmplt_epu64_mask(high, span), _mm512_cmplt_epu64_mask(low, span));
    const uint32_t used = uint32_t(bits_below(active(n)));
    if (__builtin_expect((near & used) == used, 1)) {
      const int64_t begin = _mm_cvtsi128_si64(_mm512_castsi512_si128(first));
      const T* q = p + begin;
      const uint64_t there = bits_below(numel - begin);
      const __m512i number = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(low)),
                                                _mm512_cvtepi64_epi32(high), 1);
      const auto part = [&](int k) PV_INLINE { return _mm512_maskz_loadu_epi32(uint16_t(there >> k), q + k); };
      __m512i found = _mm512_permutex2var_epi32(part(0), number, part(16));
      const uint32_t beyond = _mm512_cmpgt_epi32_mask(number, _mm512_set1_epi32(31)) & used;
      if (beyond) {
        const __m512i farther = _mm512_permutex2var_epi32(part(32), number, part(48));
        found = _mm512_mask_blend_epi32(beyond, found, farther);
      }
      return widen<T, W>(Vec<Raw<T>, W>{{(Reg<Raw<T>, W>)found}});
    }
  }
#endif
  const auto lane = lanes(at);
  return gather<W>(p, n, [&](int k) PV_INLINE { return lane[k]; });
}
// Update memory with join(memory, value). Scatters update one lane after the other, since lanes may have equal indices.
template <class T, class J> PV_FN void update(T* p, Value<T> a, J join) {
  in_order<T>();
  store(p, join(load(p), a));
}
template <class T, int W, class N, class J> PV_FN void update(T* p, const Vec<Value<T>, W>& a, const N& n, J join) {
  store<T>(p, join(load<T>(p, n), a), n);
}
template <class T, int W, class N, class F, class J>
PV_FN void scatter(T* p, const Vec<Value<T>, W>& a, const N& n, F at, J join) {
  const auto from = lanes(a);
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) update(p + at(k), from[k], join);
}
template <class T, int W, class N, class F> PV_FN void scatter(T* p, const Vec<Value<T>, W>& a, const N& n, F at) {
  const auto from = lanes(shrink<T, W>(a));
  const int64_t used = active(n);
  for (int k = 0; k < used; k++) ((Raw<T>*)p)[at(k)] = from[k];
}

// The lane of element k * S in a shuffle of the result so far, of registers before the s-th, and the s-th register. L:
// lanes of a register. early: elements by which the s-th register overlaps the one before it.
constexpr int lane_of(int k, int S, int s, int L, int early) {
  const int element = k * S;
  if (element < s * L) return s == 1 ? element : k;
  return element < (s + 1) * L ? L + element - s * L + early : 0;
}
// One register of every S-th element, for a small S, shuffled from S adjacent registers. load(s): the s-th of these.
// EARLY: elements by which the last of them overlaps the one before it.
template <int S, class R, class T, int EARLY, class F> PV_FN R every(F load) {
  constexpr int L = sizeof(R) / sizeof(T);
  R out = load(std::integral_constant<int, 0>());
  repeat<S - 1>([&](auto N) PV_INLINE {
    constexpr int s = decltype(N)::value + 1, early = s == S - 1 ? EARLY : 0;
    const R next = load(std::integral_constant<int, s>());
    out = [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return __builtin_shufflevector(out, next, lane_of(K, S, s, L, early)...);
    }(std::make_integer_sequence<int, L>());
  });
  return out;
}
// Nothing past the last lane is read: if all lanes are in use, the last register overlaps the one before it.
template <int S, class T, int W> PV_FN Vec<Value<T>, W> load_every(const T* p, All<W>) {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  return widen<T, W>(build<V, V::count>([&](auto K) PV_INLINE {
    return every<S, typename V::reg, Raw<T>, S - 1>([&](auto N) PV_INLINE {
      constexpr int s = decltype(N)::value, first = (decltype(K)::value * S + s) * V::lanes - (s == S - 1 ? s : 0);
      return (typename V::reg)*(const U*)((const Raw<T>*)p + first);
    });
  }));
}

// Whether one instruction loads or stores selected lanes of a register.
template <class T, class R>
constexpr bool lanes_alone = sizeof(R) == REGISTER && (sizeof(T) == 4 || sizeof(T) == 8);
template <int S, class T, int W> PV_FN Vec<Value<T>, W> load_every(const T* p, const Some<W>& n) {
  using V = Vec<Raw<T>, W>;
  if constexpr (!lanes_alone<Raw<T>, typename V::reg>) {
    return gather<W>(p, n, [](int k) PV_INLINE { return k * S; });
  } else {
    const int64_t elements = n.n * S - (S - 1);
    return widen<T, W>(build<V, V::count>([&](auto K) PV_INLINE {
      return every<S, typename V::reg, Raw<T>, 0>([&](auto N) PV_INLINE {
        constexpr int first = (decltype(K)::value * S + decltype(N)::value) * V::lanes;
        return load_lanes<typename V::reg>((const Raw<T>*)p + first, bits_below(elements - first));
      });
    }));
  }
}

// W elements from p on, `step` apart, a distance that is known at run time.
template <int W, class T, class Lanes> PV_FN auto load_strided(const T* p, int64_t step, const Lanes& n) {
  return step == 1 ? load(p, n) : gather<W>(p, n, [&](int k) PV_INLINE { return k * step; });
}
// Store lane k to element k * S of p, for the first n lanes.
template <int S, class T, int W, class N> PV_FN void store_every(T* p, const Vec<Value<T>, W>& a, const N& n) {
  using V = Vec<Raw<T>, W>;
  constexpr int L = V::lanes;
  if constexpr (!lanes_alone<Raw<T>, typename V::reg>) {
    scatter(p, a, n, [](int k) PV_INLINE { return k * S; });
  } else {
    const V raw = shrink<T, W>(a);
    const int64_t elements = active(n) * S - (S - 1);
    repeat<V::count * S>([&](auto P) PV_INLINE {
      constexpr int k = decltype(P)::value / S, first = decltype(P)::value % S * L;
      [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
        constexpr uint64_t bits = (((first + K) % S == 0 ? uint64_t(1) << K : 0) | ...);
        store_lanes((Raw<T>*)p + k * S * L + first,
                    __builtin_shufflevector(raw.r[k], raw.r[k], ((first + K) / S)...),
                    bits & bits_below(elements - (k * S * L + first)));
      }(std::make_integer_sequence<int, L>());
    });
  }
}

// Stores S vectors interleaved: lane k of the i-th one to element k * S + i. Like S calls of `store_every`, but in
// whole registers.
template <int S, class T, int W> struct Interleaved {
  using V = Vec<Raw<T>, W>;
  V parts[S];

  PV_FN void put(int64_t i, const Vec<Value<T>, W>& a) { parts[i] = shrink<T, W>(a); }

  PV_FN void write(T* p, All<W>) const {
    using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
    repeat<V::count * S>([&](auto P) PV_INLINE {
      constexpr int k = decltype(P)::value / S, first = decltype(P)::value % S * V::lanes;
      typename V::reg out = parts[0].r[k];
      repeat<S - 1>([&](auto N) PV_INLINE {
        constexpr int i = decltype(N)::value + 1;
        out = [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
          return __builtin_shufflevector(out, parts[i].r[k], lane_of_part(first + K, S, i, V::lanes, K)...);
        }(std::make_integer_sequence<int, V::lanes>());
      });
      *(U*)((Raw<T>*)p + k * S * V::lanes + first) = out;
    });
  }
  PV_FN void write(T* p, const Some<W>& n) const {
    for (int i = 0; i < S; i++) store_every<S>(p + i, widen<T, W>(parts[i]), n);
  }

  // The lane of `element` in a shuffle of the result so far and the i-th part. lane: where the result so far, at first
  // the unchanged first part, has that element.
  static constexpr int lane_of_part(int element, int s, int i, int lanes, int lane) {
    if (element % s == i) return lanes + element / s;
    return i > 1 ? lane : element % s == 0 ? element / s : 0;
  }
};

// Rows i and i + S of a square exchange their off-diagonal blocks.
template <int S, class V> PV_FN void exchange(typename V::reg& upper, typename V::reg& lower) {
  constexpr int L = V::lanes;
  [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
    const auto a = upper, b = lower;
    upper = __builtin_shufflevector(a, b, (K & S ? L + K - S : K)...);
    lower = __builtin_shufflevector(a, b, (K & S ? L + K : K + S)...);
  }(std::make_integer_sequence<int, L>());
}
template <int S, class V, size_t... I> PV_FN void exchange_all(typename V::reg* r, std::index_sequence<I...>) {
  ([&]() PV_INLINE { if constexpr (!(I & S)) exchange<S, V>(r[I], r[I + S]); }(), ...);
}
template <int S, class V> PV_FN void transpose(typename V::reg* r) {
  if constexpr (S > 0) {
    exchange_all<S, V>(r, std::make_index_sequence<V::lanes>());
    transpose<S / 2, V>(r);
  }
}

// A transposed tile of W x W elements: rows in memory, `step` elements apart, are columns in the kernel. The
// constructor loads rows, `row(k)` returns a column; `put` sets a column, `write` stores rows. Only `count` elements of
// each row, and as many rows as `n` has active lanes, are accessed.
template <class T, int W> struct Tile {
  using V = Vec<Raw<T>, W>;
  using U = typename RegisterOf<Raw<T>, V::lanes>::unaligned;
  V column[W];

  Tile() = default;
  // The rows start at p[at]. If `numel` >= 0, p has that many elements, and no others are read: columns that a mask
  // excludes may be out of bounds.
  template <class N> PV_FN Tile(const T* p, int64_t at, int64_t step, int64_t count, const N& n, int64_t numel) {
    const int64_t last = at + (W - 1) * step, low = last < at ? last : at, high = (last < at ? at : last) + W;
    const bool whole = numel >= 0 ? low >= 0 && high <= numel : count == W && active(n) == W;
    if (whole) {
      read_blocks([&](auto i) PV_INLINE { return (const Raw<T>*)p + at + decltype(i)::value * step; });
    } else {
      part((const Raw<T>*)p, at, step, count, active(n), numel);
    }
  }
  PV_FN Vec<Value<T>, W> row(int64_t k) const { return widen<T, W>(column[k]); }

  PV_FN void put(int64_t k, const Vec<Value<T>, W>& a) { column[k] = shrink<T, W>(a); }
  template <bool PAST_CACHE, class N> PV_FN void write(T* p, int64_t step, int64_t count, const N& n) const {
    Raw<T>* q = (Raw<T>*)p;
    if (count == W && active(n) == W) {
      write_blocks([&](auto i, auto j, const typename V::reg& a) PV_INLINE {
        Raw<T>* to = q + decltype(i)::value * step + decltype(j)::value;
        if constexpr (PAST_CACHE) stream_register(to, a);
        else *(U*)to = a;
      });
    } else {
      const int64_t rows = active(n);
      for (int64_t k = 0; k < count; k++) {
        const Lanes<Raw<T>, W> lane = lanes(column[k]);
        for (int64_t i = 0; i < rows; i++) q[i * step + k] = lane[int(i)];
      }
    }
  }

 private:
  static constexpr int L = V::lanes, C = V::count;
  // Transpose blocks of L x L: from rows that `from` returns to columns, or from columns to rows that `to` is passed.
  template <class F> PV_FN void read_blocks(F from) {
    each([&](auto i, auto j) PV_INLINE {
      constexpr int I = decltype(i)::value, J = decltype(j)::value;
      [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
        typename V::reg r[L] = {
            (typename V::reg)*(const U*)(from(std::integral_constant<int, I * L + int(K)>()) + J * L)...};
        transpose<L / 2, V>(r);
        ((column[J * L + K].r[I] = r[K]), ...);
      }(std::make_index_sequence<L>());
    });
  }
  template <class F> PV_FN void write_blocks(F to) const {
    each([&](auto i, auto j) PV_INLINE {
      constexpr int I = decltype(i)::value, J = decltype(j)::value;
      [&]<size_t... K>(std::index_sequence<K...>) PV_INLINE {
        typename V::reg r[L] = {column[J * L + K].r[I]...};
        transpose<L / 2, V>(r);
        (to(std::integral_constant<int, I * L + int(K)>(), std::integral_constant<int, J * L>(), r[K]), ...);
      }(std::make_index_sequence<L>());
    });
  }
  template <class F> PV_FN static void each(F f) {
    [&]<size_t... B>(std::index_sequence<B...>) PV_INLINE {
      (f(std::integral_constant<int, int(B) / C>(), std::integral_constant<int, int(B) % C>()), ...);
    }(std::make_index_sequence<C * C>());
  }
  void part(const Raw<T>* p, int64_t at, int64_t step, int64_t count, int64_t rows, int64_t numel) {
    Raw<T> lane[W][W] = {};
    for (int64_t row = 0; row < rows; row++)
      for (int64_t k = 0; k < count; k++) {
        const int64_t i = at + row * step + k;
        if (numel < 0 || (i >= 0 && i < numel)) lane[k][row] = p[i];
      }
    std::memcpy(column, lane, sizeof lane);
  }
};

// The integer f(k) in lane k.
template <int W, class F> PV_FN Vec<int64_t, W> indices(F f) {
  Lanes<int64_t, W> out;
  for (int k = 0; k < W; k++) out.lane[k] = f(k);
  return from_lanes(out);
}

}  // namespace pv
