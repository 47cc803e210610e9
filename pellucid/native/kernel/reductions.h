// Reductions: of scalars, of each lane of vectors, and across lanes.
namespace pv {

// A reduction joins partial results with `join` and starts from `identity`; `lanes` joins raw registers.
struct Sum {
  template <class T> static constexpr T identity = T(0);
  template <class V> PV_FN static V join(const V& a, const V& b) { return add(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (Reg<T, L>)(wrapping<T, L>(a) + wrapping<T, L>(b));
  }
};
struct Prod {
  template <class T> static constexpr T identity = T(1);
  template <class V> PV_FN static V join(const V& a, const V& b) { return mul(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (Reg<T, L>)(wrapping<T, L>(a) * wrapping<T, L>(b));
  }
};
struct Max {
  template <class T> static constexpr T identity = is_float<T> ? -inf<T> : std::numeric_limits<T>::lowest();
  template <class V> PV_FN static V join(const V& a, const V& b) { return maximum(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct Min {
  template <class T> static constexpr T identity = is_float<T> ? inf<T> : std::numeric_limits<T>::max();
  template <class V> PV_FN static V join(const V& a, const V& b) { return minimum(a, b); }
  template <class T, int L> PV_FN static Reg<T, L> lanes(Reg<T, L> a, Reg<T, L> b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Any {
  template <class T> static constexpr T identity = false;
  template <class V> PV_FN static V join(const V& a, const V& b) { return bitwise_or(a, b); }
};
struct Every {
  template <class T> static constexpr T identity = true;
  template <class V> PV_FN static V join(const V& a, const V& b) { return bitwise_and(a, b); }
};

template <class V> struct Fill { PV_FN static V with(V a) { return a; } };
template <class T, int W> struct Fill<Vec<T, W>> { PV_FN static Vec<T, W> with(T a) { return splat<W>(a); } };

// One running result per lane of V.
template <class Op, class V> struct Acc {
  V sofar = Fill<V>::with(Op::template identity<Lane<V>>);
  PV_FN void add(const V& a) {
    if constexpr (std::is_same_v<Op, Sum>) in_order<V>();
    sofar = Op::join(sofar, a);
  }
  template <int W> PV_FN void add(const V& a, All<W>) { add(a); }
  template <int W> PV_FN void add(const V& a, const Some<W>& n) { sofar = where(n.mask, Op::join(sofar, a), sofar); }
  PV_FN V value() const { return sofar; }
};

// The position of the maximum (minimum), the first of equals; NaN compares as greater (less) than any number.
template <class T> struct Argmax {
  T best = T();
  int64_t at = -1;
  PV_FN void add(T a, int64_t i) {
    if (at < 0 || a > best || (a != a && best == best)) best = a, at = i;
  }
  PV_FN int64_t value() const { return at; }
};
template <class T> struct Argmin {
  T best = T();
  int64_t at = -1;
  PV_FN void add(T a, int64_t i) {
    if (at < 0 || a < best || (a != a && best == best)) best = a, at = i;
  }
  PV_FN int64_t value() const { return at; }
};

// The closed blocks of a long sum, added pairwise: level k is empty or has the sum of 2^k blocks, so that the error
// grows with the logarithm of their number. The accumulator is a separate variable, so that it stays in a register.
template <class V, int LEVELS = 40> struct Blocks {
  V level[LEVELS];
  uint64_t count = 0;
  void push(V block) {
    int k = 0;
    for (; count >> k & 1; k++) block = pv::add(level[k], block);
    level[k] = block;
    count++;
  }
  PV_FN void close(Acc<Sum, V>& acc) {
    push(acc.value());
    acc = Acc<Sum, V>();
  }
  V value() const {
    V all = Fill<V>::with(Lane<V>(0));
    for (int k = 0; k < LEVELS; k++)
      if (count >> k & 1) all = pv::add(all, level[k]);
    return all;
  }
};

// All lanes of a joined into one: first registers, then halves of the last register.
template <class Op, class T, int L> PV_FN T fold(Reg<T, L> a) {
  if constexpr (L == 1) return a[0];
  else return fold<Op, T, L / 2>(Op::template lanes<T, L / 2>(piece<0, L / 2, T, L>(a), piece<L / 2, L / 2, T, L>(a)));
}
template <class Op, int FROM, int N, class T, int W> PV_FN auto fold_registers(const Vec<T, W>& a) {
  if constexpr (N == 1) {
    return a.r[FROM];
  } else {
    const auto low = fold_registers<Op, FROM, N / 2>(a), high = fold_registers<Op, FROM + N / 2, N / 2>(a);
    return Op::template lanes<T, Vec<T, W>::lanes>(low, high);
  }
}
template <class Op, class T, int W> PV_FN T total(const Vec<T, W>& a) {
  if constexpr (std::is_same_v<T, bool>) {
    const auto lane = lanes(a);
    T result = lane[0];
    for (int k = 1; k < W; k++) result = Op::join(result, lane[k]);
    return result;
  } else {
    return fold<Op, T, Vec<T, W>::lanes>(fold_registers<Op, 0, Vec<T, W>::count>(a));
  }
}

// Argmax or Argmin for each lane of a vector. I: the type of positions, wide enough for the last one. Positions passed
// and stored are those of lane 0. After the first elements few are better than all before, so the common step is a
// comparison and a branch.
template <class Op, class T, int W, class I> struct Arg {
  static constexpr bool is_max = std::is_same_v<Op, Max>;
  Vec<T, W> best = splat<W>(Op::template identity<T>);
  Vec<I, W> at = splat<W>(I(0));  // where the identity is the best, the first element is the first of equals
  PV_FN Vec<bool, W> better(const Vec<T, W>& a) const {  // also true if one of the two is NaN
    return is_max ? compare<NOT_LE>(a, best) : compare<NOT_LE>(best, a);
  }
  PV_FN void take(const Vec<bool, W>& better, const Vec<T, W>& a, int64_t i) {
    const auto now = is_float<T> ? bitwise_and(better, compare<EQ>(best, best)) : better;
    best = where(now, a, best);
    at = where(now, splat<W>(I(i)), at);
  }
  PV_FN void add(const Vec<T, W>& a, int64_t i, All<W> = {}) {
    const auto m = better(a);
    if (any(m)) take(m, a, i);
  }
  PV_FN void add(const Vec<T, W>& a, int64_t i, const Some<W>& n) { take(both(better(a), n), a, i); }
  PV_FN Vec<int64_t, W> value() const { return cast<int64_t>(at); }
  // The first of all lanes, where neighbouring lanes have neighbouring positions.
  PV_FN int64_t first() const {
    const T winner = total<Op>(best);
    const auto same = winner == winner ? compare<EQ>(best, splat<W>(winner)) : compare<NE>(best, best);
    const auto position = add_lanes(at);
    return total<Min>(where(same, position, splat<W>(std::numeric_limits<I>::max())));
  }
  PV_FN static Vec<I, W> add_lanes(const Vec<I, W>& a) { return pv::add(a, cast<I>(iota<W>(0, 1))); }
};

}  // namespace pv
