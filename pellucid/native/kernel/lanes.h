// Access to single lanes of vectors, operators without vector instructions, and the active lanes of a step.
namespace pv {

template <int W, class T> PV_FN Vec<T, W> splat(T a) {
  using V = Vec<T, W>;
  if constexpr (std::is_same_v<T, bool>) {
    return build<V, V::count>([&](auto) PV_INLINE { return typename V::reg() - a; });
  } else {
    return build<V, V::count>([&](auto) PV_INLINE {
      return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
        return typename V::reg{(void(K), a)...};
      }(std::make_integer_sequence<int, V::lanes>());
    });
  }
}

// base + k * step in lane k.
template <int W> PV_FN Vec<int64_t, W> iota(int64_t base, int64_t step) {
  using V = Vec<int64_t, W>;
  return build<V, V::count>([&](auto R) PV_INLINE {
    return [&]<int... K>(std::integer_sequence<int, K...>) PV_INLINE {
      return typename V::reg{(base + (decltype(R)::value * V::lanes + K) * step)...};
    }(std::make_integer_sequence<int, V::lanes>());
  });
}

// The lanes k for which first + k < limit.
template <int W> PV_FN Vec<bool, W> below(int64_t first, int64_t limit) {
  const int64_t n = limit - first;
  return first_lanes<W>(n < 0 ? 0 : n < W ? n : W);
}

// The lanes of a vector in memory, for code that processes one lane at a time.
template <class T, int W> struct Lanes {
  alignas(64) T lane[W];
  PV_FN T operator[](int k) const { return lane[k]; }
};
template <class T, int W> PV_FN Lanes<T, W> lanes(const Vec<T, W>& a) {
  Lanes<T, W> out;
  if constexpr (std::is_same_v<T, bool>) {
    const auto bytes = where(a, splat<W>(uint8_t(1)), splat<W>(uint8_t(0)));
    std::memcpy(out.lane, bytes.r, sizeof out.lane);
  } else {
    std::memcpy(out.lane, a.r, sizeof out.lane);
  }
  return out;
}
template <class T, int W> PV_FN Vec<T, W> from_lanes(const Lanes<T, W>& a) {
  if constexpr (std::is_same_v<T, bool>) {
    Vec<uint8_t, W> bytes;
    std::memcpy(bytes.r, a.lane, sizeof a.lane);
    return compare<NE>(bytes, splat<W>(uint8_t(0)));
  } else {
    Vec<T, W> out;
    std::memcpy(out.r, a.lane, sizeof a.lane);
    return out;
  }
}

// f of each lane, for operators without vector instructions.
template <class F, class T, int W, class... More>
PV_FN auto lanewise(F f, const Vec<T, W>& a, const More&... more) {
  const auto first = lanes(a);
  return [&](const auto&... rest) PV_INLINE {
    Lanes<decltype(f(first[0], rest[0]...)), W> out;
    for (int k = 0; k < W; k++) out.lane[k] = f(first[k], rest[k]...);
    return from_lanes(out);
  }(lanes(more)...);
}

// The active lanes of a step: all of them, or the first n.
template <int W> struct All {};
template <int W> struct Some {
  int64_t n;
  Vec<bool, W> mask;
  PV_FN explicit Some(int64_t n) : n(n), mask(first_lanes<W>(n)) {}
};
template <int W> PV_FN int64_t active(All<W>) { return W; }
template <int W> PV_FN int64_t active(const Some<W>& n) { return n.n; }

}  // namespace pv
