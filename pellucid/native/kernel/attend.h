// Attention: softmax(scale * q @ k^T + mask) @ v for some rows of one head, without a matrix of all scores. Scores may be
// capped before the mask is added, and a row may have a sink: a score beside those of keys that has no value.
//
// Keys are taken in blocks (KEYS), which are packed once for all rows of the call and stay in the second cache: keys as
// columns of the first product, values as columns of the second. For some rows at a time (QUERIES) the scores of a
// block become weights in place, relative to the greatest score so far, and the sums of the rows are made relative to it
// too (online softmax). Few rows do not pay for packing: they read keys by dot products and values where they lie.
//
// Scores, sums and the softmax are in f32; both products multiply units, see micro.h, so that in bf16 weights are
// rounded to it, as ATen's are. A row without any key is zero or NaN, as eager has it for the fused operator and for a
// softmax.
namespace pv {

// Rows whose scores are in work at once: what the micro-kernel takes in one go, or twice that.
template <class E> constexpr int ROWS_AT_ONCE = BY_AMX<Factor<E>> ? AMX_ROWS : QUERIES;
// How many keys at a time are read where they lie: they stay in the first cache while all rows and columns use them.
constexpr int KEYS_IN_PLACE = 64;

// A matrix that is written.
template <class E> struct Results {
  E* at;
  int64_t row, column;
  PV_FN E* operator()(int64_t i, int64_t j) const { return at + i * row + j * column; }
  PV_FN Results from(int64_t i, int64_t j) const { return {(*this)(i, j), row, column}; }
};

// The first row of `to` (+)= D sums, times a factor.
template <int D, class E> PV_FN void put_row(const float* sums, float factor, const Results<E>& to, bool more) {
  if (to.column == 1)
    return steps<COLUMN>(0, D, [&](auto l, int64_t j) PV_INLINE {
      const auto all = mul(load<float>(sums + j, l), splat<COLUMN>(factor));
      store<E>(to.at + j, more ? add(all, load((const E*)to.at + j, l)) : all, l);
    });
  for (int64_t j = 0; j < D; j++) store(to(0, j), sums[j] * factor + (more ? load((const E*)to(0, j)) : 0.0f));
}

// What a mask does to scores: it is added; it is added but where it is -inf, and stands there in place of a score that
// may be NaN; or it stands in place of scores wherever it is not zero.
enum class Masking { ADDS, HIDES, REPLACES };

// Rows of queries (row, term), keys (key, term), values (key, column), and what is added to scores (row, key); results
// (row, column), and for each row the logarithm of the sum that its weights are divided by; or, where `logarithm` is
// given, the greatest score in `logsumexp` and there the logarithm of the sum relative to it. Mask, sinks (row, 0) and
// logarithms may be null. causal: row i sees the first `seen` + i keys. zero: a row without any key is zero, else NaN.
// cap: scores are cap * tanh(score / cap), if not 0.
template <class E, class Added> struct Attention {
  Matrix<E> queries, keys, values;
  Matrix<Added> mask;
  Masking masking;
  float scale;
  bool causal;
  int64_t seen;
  bool zero;
  float cap;
  Matrix<float> sinks;
  Results<E> out;
  Results<float> logsumexp, logarithm;
};

// e^x for x <= 0; zero where that is less than e^-87, NaN for NaN.
template <int W> PV_FN Vec<float, W> exp_of_negative(const Vec<float, W>& x) {
  const auto parts = exp_parts(x);
  const auto mantissa = as<int32_t>(add(parts.less_one, splat<W>(1.0f)));
  const auto exponent = map<int32_t>([](auto n) PV_INLINE { return n << 23; }, convert<int32_t>(parts.n));
  return where(lt(x, splat<W>(-87.0f)), splat<W>(0.0f), as<float>(add(mantissa, exponent)));
}

// The maximum of numbers: a NaN does not count, since it makes the sum of weights NaN.
struct Greatest {
  template <class T> static constexpr T identity = -inf<T>;
  template <class V> PV_FN static V join(const V& a, const V& b) {
    return map<float>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(max)(y, x); }, a, b);
  }
};

// What a row has seen: its greatest score (scaled), and the sum of its weights relative to that.
struct Seen {
  float greatest, sum;

  // A row that has seen a sink alone: nothing of it where that is -inf, NaN where a softmax has it.
  PV_FN static Seen of(float sink) { return {sink, sink == -inf<float> ? 0.0f : 1.0f + (sink - sink)}; }
};

// Beyond this a score is rounded before the greatest one, which was rounded too, is subtracted: what one of them lost
// would be in the exponent of a weight.
constexpr float ROUNDED = 4096.0f;

PV_FN void scale_scores(float* scores, int64_t n, float scale) {
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE {
    store<float>(scores + j, mul(load<float>(scores + j, l), splat<COLUMN>(scale)), l);
  });
}

// The n scores of a row become weights relative to the greatest so far, of type F and in the same memory; gives the
// factor for what was summed before. PLAIN: they are still to be scaled.
template <bool PLAIN, class F>
PV_SHARED float weigh(float* scores, int64_t n, float scale, Seen& row) {
  constexpr int W = COLUMN;  // GCC keeps more of them in memory
  const auto factor = splat<W>(scale);
  Acc<Greatest, Vec<float, 4 * COLUMN>> top;
  steps<4 * COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE { top.add(load<float>(scores + j, l), l); });
  const float most = total<Max>(top.value()) * (PLAIN ? scale : 1.0f);
  const float now = most > row.greatest ? most : row.greatest;
  if constexpr (PLAIN)
    if (scale != 1 && !(abs(now) < ROUNDED)) {
      scale_scores(scores, n, scale);
      return weigh<false, F>(scores, n, 1.0f, row);
    }
  const float base = now == -inf<float> ? 0.0f : now;
  const auto less = splat<W>(-base);
  Acc<Sum, Vec<float, W>> sum;
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = load<float>(scores + j, l);
    const auto weight = exp_of_negative(PLAIN ? fma(a, factor, less) : add(a, less));
    store<F>((F*)scores + j, weight, l);
    sum.add(weight, l);
  });
  const float before = now == row.greatest ? 1.0f : libm::exp(row.greatest - base);
  row.sum = row.sum * before + total<Sum>(sum.value());
  row.greatest = now;
  return before;
}

// scores = cap * tanh(scores * scale / cap). Added: of the mask, which this does not depend on.
template <class Added>
PV_SHARED void cap_scores(float* scores, int64_t n, float scale, float cap) {
  constexpr int W = 2 * COLUMN;
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = tanh(mul(load<float>(scores + j, l), splat<W>(scale / cap)));
    store<float>(scores + j, mul(a, splat<W>(cap)), l);
  });
}

// What a mask makes of scores * scale.
template <int W>
PV_FN Vec<float, W> masked(const Vec<float, W>& score, const Vec<float, W>& mask, Masking masking) {
  if (masking == Masking::ADDS) return add(score, mask);
  if (masking == Masking::HIDES) return where(eq(mask, splat<W>(-inf<float>)), mask, add(score, mask));
  return where(eq(mask, splat<W>(0.0f)), score, mask);
}

template <class Added>
PV_SHARED void add_mask(
    float* scores, int64_t n, float scale, const Added* mask, int64_t step, Masking masking) {
  constexpr int W = 4 * COLUMN;
  if (mask && step != 1) {
    for (int64_t j = 0; j < n; j++) {
      const float score = scores[j] * scale, added = load(mask + j * step);
      scores[j] = masking == Masking::REPLACES ? (added == 0 ? score : added)
          : masking == Masking::HIDES && added == -inf<float> ? added : score + added;
    }
    return;
  }
  const auto factor = splat<W>(scale);
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = mul(load<float>(scores + j, l), factor);
    if (!mask) return store<float>(scores + j, a, l);
    store<float>(scores + j, masked(a, load(mask + j, l), masking), l);
  });
}

template <int D>
PV_FN void rescale(float* sums, float factor) {
  if (factor == 1.0f) return;
  for (int j = 0; j < D; j += COLUMN) write_column(sums + j, read_column(sums + j) * spread(factor));
}

// to[rows, n] = a[rows, D] @ b[D, n], with panels of b. Rows are copied: where they lie they may share sets of the cache.
template <int D, int STEP, class E>
PV_FN void times_panels(Beside& beside, const Matrix<E>& a, int64_t rows, const float* panels, int64_t n, float* to) {
  constexpr int UNITS = units_of<E>(D);
  using F = Factor<E>;
  alignas(64) float units[ROWS_AT_ONCE<E> * UNITS];
  copy_rows(a, rows, D, units, UNITS);
  const Matrix<F> copied{(const F*)units, TERMS<E> * UNITS, 1};
  for (int64_t j = 0; j < n; j += COLUMNS)
    panel<0>(beside, rows, n - j, UNITS, LeftRows(copied), Rows{panels + j * UNITS, COLUMNS}, {to + j, STEP, false});
}

// The block of keys that is at work: where they lie as panels, or, for few rows, in the operands.
struct KeyBlock {
  const float *keys, *values;  // null: in the operands
  int64_t from;

  // Its keys from the n-th on: whole panels.
  template <class E, int D> PV_FN KeyBlock after(int64_t n) const {
    return {keys ? keys + n * units_of<E>(D) : nullptr, values ? values + n / TERMS<E> * COLUMNS : nullptr, from + n};
  }
};

// scores[rows, n] of the rows from `first` on.
template <int D, int STEP, class E, class Added>
PV_FN void score(
    Beside& beside, const Attention<E, Added>& a, const KeyBlock& block, int64_t first, int64_t rows, int64_t n,
    float* scores) {
  const Matrix<E> queries = a.queries.from(first, 0);
  if (block.keys) return times_panels<D, STEP>(beside, queries, rows, block.keys, n, scores);
  const Matrix<E> columns = transposed(a.keys.from(block.from, 0));
  for (int64_t j = 0; j < n; j += KEYS_IN_PLACE)
    dot_block(rows, least(KEYS_IN_PLACE, n - j), D, queries, columns.from(0, j), {scores + j, STEP, false});
}

// sums[rows, D] (+)= weights[rows, n] @ values
template <int D, int KEYS, int STEP, class E, class Added>
PV_FN void add_values(
    Beside& beside, const Attention<E, Added>& a, const KeyBlock& block, int64_t rows, int64_t n, const float* scores,
    Sums sums) {
  constexpr int T = TERMS<E>;
  const Matrix<Factor<E>> weights{(const Factor<E>*)scores, STEP * T, 1};
  if (block.values) {
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(beside, rows, D - j, units_of<E>(n), LeftRows(weights), Rows{block.values + j * units_of<E>(KEYS), COLUMNS},
               sums.from(0, j));
    return;
  }
  const Matrix<E> values = a.values.from(block.from, 0);
  for (int64_t t = 0; t < n; t += KEYS_IN_PLACE, sums.more = true) {
    const int64_t units = least(KEYS_IN_PLACE, n - t) / T;
    const LeftRows left = weights.from(0, t);
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(beside, rows, D - j, units, left, LyingRows<E>{values(t, j), values.row}, sums.from(0, j));
  }
  if (n % T == 0) return;
  for (int64_t i = 0; i < rows; i++)  // the key that is no whole unit
    for (int64_t j = 0; j < D; j++) {
      float& to = *sums.from(i, j).at;
      to = __builtin_fmaf(load(weights(i, n - 1)), load(values(n - 1, j)), to);
    }
}

// The scores of a row become weights; gives the factor for what was summed before.
template <class E, class Added>
PV_FN float weigh_row(
    const Attention<E, Added>& a, int64_t row, int64_t from, int64_t n, float* scores, Seen& seen) {
  using F = Factor<E>;
  if (a.cap != 0) cap_scores<Added>(scores, n, a.scale, a.cap);
  const float scale = a.cap != 0 ? 1.0f : a.scale;
  if (!a.mask.at && scale > 0) return weigh<true, F>(scores, n, scale, seen);
  const Added* mask = a.mask.at ? a.mask(row, from) : nullptr;
  add_mask(scores, n, scale, mask, a.mask.column, a.masking);
  return weigh<false, F>(scores, n, 1.0f, seen);
}

// The keys that rows at work see. They are looked for where a mask may hide some: those that have to be read to know
// that they may be left out are no less work in few rows, unless a mask stands in place of their scores.
template <int D, int M, class E, class Added> struct Sight {
  const Attention<E, Added>& a;
  int64_t n;
  bool looks;
  int8_t sees[M / ROWS_AT_ONCE<E> + 1];  // whether each row at work sees a key; -1: not known
  Shown shown[M / ROWS_AT_ONCE<E> + 1];  // of the block that is at work, to the same rows
  float key = -1, value = -1;            // norms; -1: not known

  Sight(const Attention<E, Added>& a, int64_t m, int64_t n)
      : a(a), n(n), looks(a.mask.at && a.mask.column == 1 && (a.masking != Masking::ADDS || m > ROWS_IN_PLACE)) {
    std::memset(sees, -1, sizeof sees);
  }

  // Look at `count` keys from `from` on; whether any of m rows sees one.
  bool look(int64_t m, int64_t from, int64_t count) {
    bool any = false;
    for (int64_t first = 0; first < m; first += ROWS_AT_ONCE<E>) {
      const int64_t rows = least(ROWS_AT_ONCE<E>, m - first);
      const int64_t most = a.causal ? least(count, a.seen + first + rows - 1 - from) : count;
      const Shown keys = shown[first / ROWS_AT_ONCE<E>] = of(first, rows, from, most);
      any |= keys.from < keys.to;
    }
    return any;
  }

  // Of `most` keys from `from` on.
  Shown of(int64_t first, int64_t rows, int64_t from, int64_t most) {
    if (!looks || most <= 0) return {0, most};
    return seen_keys(a.mask.from(first, from), rows, most, [&] { return below(first, rows); });
  }

  float below(int64_t first, int64_t rows) {
    int8_t& known = sees[first / ROWS_AT_ONCE<E>];
    if (known < 0) known = each_sees(a.mask(first, 0), a.mask.row, rows, a.causal ? least(n, a.seen + first) : n);
    if (value == -1) key = norm(a.keys, n, D), value = norm(a.values, n, D);
    const float score = abs(a.scale) * norm(a.queries.from(first, 0), rows, D) * key;
    return hides_below(score, value, a.masking != Masking::ADDS, known);
  }
};

// m rows, at most M, of n keys. D: columns, and terms of the first product.
template <int D, int M, int KEYS, class E, class Added>
inline void attend(int64_t m, int64_t n, const Attention<E, Added>& a) {
  static_assert(KEYS % COLUMNS == 0 && KEYS_HIDDEN % COLUMNS == 0);
  using F = Factor<E>;
  constexpr int WIDTH = panels_of(D);
  constexpr int UNITS = units_of<E>(D), PAIRS = units_of<E>(KEYS);  // of a query, and of a column of values
  constexpr int STEP = KEYS + COLUMNS;  // so that rows lie in different sets of the first cache
  alignas(64) float keys[KEYS * UNITS], values[PAIRS * WIDTH], scores[ROWS_AT_ONCE<E> * STEP], sums[M * WIDTH];
  Seen seen[M];
  Beside beside;
  for (int64_t i = 0; i < m; i++) seen[i] = Seen::of(a.sinks.at ? *a.sinks(i, 0) : -inf<float>);
  const bool few = m <= ROWS_IN_PLACE;
  const bool keys_there = few && a.keys.column == 1 && a.queries.column == 1;
  const bool values_there = few && a.values.column == 1 && D % COLUMNS == 0;
  const int64_t last = a.causal ? least(n, a.seen + m - 1) : n;
  Sight<D, M, E, Added> sight(a, m, last);
  bool begun[M / ROWS_AT_ONCE<E> + 1] = {};  // whether there are sums of the rows at work
  for (int64_t from = 0; from < last; from += KEYS) {
    const int64_t count = least(KEYS, last - from);
    const KeyBlock whole{keys_there ? nullptr : keys, values_there ? nullptr : values, from};
    if (!sight.look(m, from, count)) continue;
    if (!keys_there) pack_columns(transposed(a.keys.from(from, 0)), D, count, keys, COLUMNS * UNITS);
    if (!values_there) pack_columns(a.values.from(from, 0), count, D, values, COLUMNS * PAIRS);
    for (int64_t first = 0; first < m; first += ROWS_AT_ONCE<E>) {
      const int64_t rows = least(ROWS_AT_ONCE<E>, m - first);
      const Shown part = sight.shown[first / ROWS_AT_ONCE<E>];
      bool& more = begun[first / ROWS_AT_ONCE<E>];
      const int64_t most = part.to - part.from;
      if (most <= 0) continue;
      const KeyBlock block = whole.after<E, D>(part.from);
      const auto visible = [&](int64_t row) PV_INLINE { return a.causal ? least(most, a.seen + row - block.from) : most; };
      score<D, STEP>(beside, a, block, first, rows, most, scores);
      for (int64_t i = 0; i < rows; i++) {
        float* row = scores + i * STEP;
        const int64_t some = visible(first + i);
        if (some > 0) {
          const float before = weigh_row(a, first + i, block.from, some, row, seen[first + i]);
          if (more) rescale<WIDTH>(sums + (first + i) * WIDTH, before);
        }
        for (int64_t j = some < 0 ? 0 : some; j < units_of<E>(most) * TERMS<E>; j++) ((F*)row)[j] = F{};
      }
      add_values<D, KEYS, STEP>(beside, a, block, rows, most, scores, {sums + first * WIDTH, WIDTH, more});
      more = true;
    }
  }
  for (int64_t i = 0; i < m; i++) {
    const float all = seen[i].sum;
    const bool empty = a.zero && all == 0;
    if (!begun[i / ROWS_AT_ONCE<E>]) std::memset(sums + i * WIDTH, 0, WIDTH * sizeof(float));
    put_row<D>(sums + i * WIDTH, empty ? 1.0f : 1.0f / all, a.out.from(i, 0), false);
    if (!a.logsumexp.at) continue;
    const float logarithm = libm::log(all), greatest = seen[i].greatest;
    if (a.logarithm.at) *a.logarithm(i, 0) = logarithm;
    const float base = greatest == -inf<float> ? 0.0f : greatest;
    *a.logsumexp(i, 0) = a.logarithm.at ? base : empty ? 0.0f : greatest + logarithm;
  }
}

}  // namespace pv
