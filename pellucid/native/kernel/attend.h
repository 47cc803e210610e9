// Attention: softmax(scale * q @ k^T + mask) @ v for some rows of one head, without a matrix of all scores. Scores may
// be capped before the mask is added, and a row may have a sink: an additional score without a value.
//
// Keys are processed in blocks (KEYS), which are packed once for all rows of the call and stay in the L2 cache: keys as
// columns of the first product, values as columns of the second. For QUERIES rows at a time the scores of a block
// become weights in place, relative to the maximum score so far, and the sums of the rows are rescaled to it (online
// softmax). For few rows packing does not pay: keys are read by dot products, and values in place.
//
// Scores, sums and the softmax are in f32; both products multiply units, see micro.h, so in bf16 weights are rounded to
// it, as ATen's are. A row without any key is zero or NaN, as in eager mode for the fused operator and for a softmax.
namespace pv {

// Rows whose scores are computed at a time: as many as the micro-kernel processes in one step, or twice as many.
template <class E> constexpr int ROWS_AT_ONCE = BY_AMX<Factor<E>> ? AMX_ROWS : QUERIES;
// Number of keys at a time that are read in place: they stay in the L1 cache while all rows and columns use them.
constexpr int KEYS_IN_PLACE = 64;

// A matrix that is written, see `Matrix`.
template <class E> struct OutputMatrix {
  E* at;
  int64_t row, column;
  PV_FN E* operator()(int64_t i, int64_t j) const { return at + i * row + j * column; }
  PV_FN OutputMatrix from(int64_t i, int64_t j) const { return {(*this)(i, j), row, column}; }
};

// The first row of `to` (+)= D sums times a factor. more: add.
template <int D, class E> PV_FN void store_row(const float* sums, float factor, const OutputMatrix<E>& to, bool more) {
  if (to.column == 1)
    return steps<COLUMN>(0, D, [&](auto l, int64_t j) PV_INLINE {
      const auto all = mul(load<float>(sums + j, l), splat<COLUMN>(factor));
      store<E>(to.at + j, more ? add(all, load((const E*)to.at + j, l)) : all, l);
    });
  for (int64_t j = 0; j < D; j++) store(to(0, j), sums[j] * factor + (more ? load((const E*)to(0, j)) : 0.0f));
}

// How a mask is applied to scores. ADDS: it is added. HIDES: it is added, but -inf replaces the score, which may be
// NaN. REPLACES: it replaces the score wherever it is not zero.
enum class Masking { ADDS, HIDES, REPLACES };

// The operands of attention: queries (row, term), keys (key, term), values (key, column), mask (row, key), sinks (row,
// 0); and its results: out (row, column), and for each row the log-sum-exp of its scores, or, if `logarithm` is not
// null, the maximum score in `logsumexp` and the logarithm of the sum relative to it in `logarithm`. mask, sinks,
// logsumexp and logarithm may be null. causal: row i attends to the first `causal_keys` + i keys. zero: a row without
// any key is zero, else NaN. cap: if not 0, scores are cap * tanh(score / cap).
template <class E, class Added> struct Attention {
  Matrix<E> queries, keys, values;
  Matrix<Added> mask;
  Masking masking;
  float scale;
  bool causal;
  int64_t causal_keys;
  bool zero;
  float cap;
  Matrix<float> sinks;
  OutputMatrix<E> out;
  OutputMatrix<float> logsumexp, logarithm;
};

// e^x for x <= 0; zero for x < -87, NaN for NaN.
template <int W> PV_FN Vec<float, W> exp_of_negative(const Vec<float, W>& x) {
  const auto parts = exp_parts(x);
  const auto mantissa = as<int32_t>(add(parts.less_one, splat<W>(1.0f)));
  const auto exponent = map<int32_t>([](auto n) PV_INLINE { return n << 23; }, convert<int32_t>(parts.n));
  return where(lt(x, splat<W>(-87.0f)), splat<W>(0.0f), as<float>(add(mantissa, exponent)));
}

// The maximum of numbers, ignoring NaN: a NaN score makes the sum of weights NaN anyway.
struct MaxIgnoringNaN {
  template <class T> static constexpr T identity = -inf<T>;
  template <class V> PV_FN static V join(const V& a, const V& b) {
    return map<float>([](auto x, auto y) PV_INLINE { return (decltype(x))PV_PS(max)(y, x); }, a, b);
  }
};

// The online softmax of a row: the maximum of its (scaled) scores so far, and the sum of its weights relative to that.
struct SoftmaxState {
  float max, sum;

  // The state after the sink alone: empty if the sink is -inf, NaN where a softmax of it is NaN.
  PV_FN static SoftmaxState of(float sink) { return {sink, sink == -inf<float> ? 0.0f : 1.0f + (sink - sink)}; }
};

// From this magnitude on, scores are scaled (and rounded) before the maximum is subtracted. With an FMA, only the
// maximum would be rounded, and its rounding error would be in the exponent of a weight.
constexpr float LARGE_SCORE = 4096.0f;

PV_FN void scale_scores(float* scores, int64_t n, float scale) {
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE {
    store<float>(scores + j, mul(load<float>(scores + j, l), splat<COLUMN>(scale)), l);
  });
}

// Turn n scores of a row into weights relative to the maximum so far, in place and as type F; return the factor that
// rescales the previous sums. UNSCALED: the scores are still to be multiplied by `scale`.
template <bool UNSCALED, class F>
PV_SHARED float softmax_block(float* scores, int64_t n, float scale, SoftmaxState& row) {
  constexpr int W = COLUMN;  // GCC spills wider vectors
  const auto factor = splat<W>(scale);
  Acc<MaxIgnoringNaN, Vec<float, 4 * COLUMN>> top;
  steps<4 * COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE { top.add(load<float>(scores + j, l), l); });
  const float most = total<Max>(top.value()) * (UNSCALED ? scale : 1.0f);
  const float now = most > row.max ? most : row.max;
  if constexpr (UNSCALED)
    if (scale != 1 && !(abs(now) < LARGE_SCORE)) {
      scale_scores(scores, n, scale);
      return softmax_block<false, F>(scores, n, 1.0f, row);
    }
  const float base = now == -inf<float> ? 0.0f : now;
  const auto less = splat<W>(-base);
  Acc<Sum, Vec<float, W>> sum;
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = load<float>(scores + j, l);
    const auto weight = exp_of_negative(UNSCALED ? fma(a, factor, less) : add(a, less));
    store<F>((F*)scores + j, weight, l);
    sum.add(weight, l);
  });
  const float rescaled = now == row.max ? 1.0f : libm::exp(row.max - base);
  row.sum = row.sum * rescaled + total<Sum>(sum.value());
  row.max = now;
  return rescaled;
}

// scores = cap * tanh(scores * scale / cap). Added: the type of the mask, on which this does not depend.
template <class Added>
PV_SHARED void cap_scores(float* scores, int64_t n, float scale, float cap) {
  constexpr int W = 2 * COLUMN;
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = tanh(mul(load<float>(scores + j, l), splat<W>(scale / cap)));
    store<float>(scores + j, mul(a, splat<W>(cap)), l);
  });
}

// Scaled scores with the mask applied.
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
  const auto factor = splat<W>(scale);
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto a = mul(load<float>(scores + j, l), factor);
    if (!mask) return store<float>(scores + j, a, l);
    store<float>(scores + j, masked(a, load_strided<W>(mask + j * step, step, l), masking), l);
  });
}

template <int D>
PV_FN void rescale(float* sums, float factor) {
  if (factor == 1.0f) return;
  for (int j = 0; j < D; j += COLUMN) write_column(sums + j, read_column(sums + j) * broadcast(factor));
}

// to[rows, n] = a[rows, D] @ b[D, n], with panels of b. Rows of a are copied, since in place they may share cache sets.
template <int D, int STEP, class E>
PV_FN void multiply_by_panels(
    BlockState& state, const Matrix<E>& a, int64_t rows, const float* panels, int64_t n, float* to) {
  constexpr int UNITS = units_of<E>(D);
  using F = Factor<E>;
  alignas(64) float units[ROWS_AT_ONCE<E> * UNITS];
  copy_rows(a, rows, D, units, UNITS);
  const Matrix<F> copied{(const F*)units, TERMS<E> * UNITS, 1};
  for (int64_t j = 0; j < n; j += COLUMNS)
    panel<0>(state, rows, n - j, UNITS, LeftRows(copied), Rows{panels + j * UNITS, COLUMNS}, {to + j, STEP, false});
}

// The current block of keys: its panels, or, for few rows, null if the operands are read in place.
struct KeyBlock {
  const float *keys, *values;  // null: read in place
  int64_t from;

  // Its keys from the n-th on, where n is a multiple of COLUMNS.
  template <class E, int D> PV_FN KeyBlock after(int64_t n) const {
    return {keys ? keys + n * units_of<E>(D) : nullptr, values ? values + n / TERMS<E> * COLUMNS : nullptr, from + n};
  }
};

// scores[rows, n] = queries[first + rows, D] @ keys^T, not scaled.
template <int D, int STEP, class E, class Added>
PV_FN void score(
    BlockState& state, const Attention<E, Added>& a, const KeyBlock& block, int64_t first, int64_t rows, int64_t n,
    float* scores) {
  const Matrix<E> queries = a.queries.from(first, 0);
  if (block.keys) return multiply_by_panels<D, STEP>(state, queries, rows, block.keys, n, scores);
  const Matrix<E> columns = transposed(a.keys.from(block.from, 0));
  for (int64_t j = 0; j < n; j += KEYS_IN_PLACE)
    dot_block(rows, least(KEYS_IN_PLACE, n - j), D, queries, columns.from(0, j), {scores + j, STEP, false});
}

// sums[rows, D] (+)= weights[rows, n] @ values
template <int D, int KEYS, int STEP, class E, class Added>
PV_FN void add_values(
    BlockState& state, const Attention<E, Added>& a, const KeyBlock& block, int64_t rows, int64_t n,
    const float* scores, Sums sums) {
  constexpr int T = TERMS<E>;
  const Matrix<Factor<E>> weights{(const Factor<E>*)scores, STEP * T, 1};
  if (block.values) {
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(state, rows, D - j, units_of<E>(n), LeftRows(weights),
               Rows{block.values + j * units_of<E>(KEYS), COLUMNS}, sums.from(0, j));
    return;
  }
  const Matrix<E> values = a.values.from(block.from, 0);
  for (int64_t t = 0; t < n; t += KEYS_IN_PLACE, sums.more = true) {
    const int64_t units = least(KEYS_IN_PLACE, n - t) / T;
    const LeftRows left = weights.from(0, t);
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(state, rows, D - j, units, left, UnpackedRows<E>{values(t, j), values.row}, sums.from(0, j));
  }
  if (n % T == 0) return;
  for (int64_t i = 0; i < rows; i++)  // the last key, which is half a unit
    for (int64_t j = 0; j < D; j++) {
      float& to = *sums.from(i, j).at;
      to = __builtin_fmaf(load(weights(i, n - 1)), load(values(n - 1, j)), to);
    }
}

// Turn the scores of a row into weights (cap, mask, softmax); return the factor that rescales the previous sums.
template <class E, class Added>
PV_FN float softmax_row(
    const Attention<E, Added>& a, int64_t row, int64_t from, int64_t n, float* scores, SoftmaxState& state) {
  using F = Factor<E>;
  if (a.cap != 0) cap_scores<Added>(scores, n, a.scale, a.cap);
  const float scale = a.cap != 0 ? 1.0f : a.scale;
  if (!a.mask.at && scale > 0) return softmax_block<true, F>(scores, n, scale, state);
  const Added* mask = a.mask.at ? a.mask(row, from) : nullptr;
  add_mask(scores, n, scale, mask, a.mask.column, a.masking);
  return softmax_block<false, F>(scores, n, 1.0f, state);
}

// Which keys the current rows attend to. Keys are skipped only where that may pay: with few rows, reading keys and
// values for the norms that an added mask requires costs as much as the attention itself.
template <int D, int M, class E, class Added> struct KeyVisibility {
  const Attention<E, Added>& a;
  int64_t n;
  bool may_skip;
  // For each group of ROWS_AT_ONCE rows:
  int8_t has_visible[M / ROWS_AT_ONCE<E> + 1];   // whether each row has a visible key; -1: not computed yet
  VisibleKeys visible[M / ROWS_AT_ONCE<E> + 1];  // the visible keys of the current block
  float key_norm = -1, value_norm = -1;          // norms; -1: not computed yet

  KeyVisibility(const Attention<E, Added>& a, int64_t m, int64_t n)
      : a(a), n(n), may_skip(a.mask.at && a.mask.column == 1 && (a.masking != Masking::ADDS || m > ROWS_IN_PLACE)) {
    std::memset(has_visible, -1, sizeof has_visible);
  }

  // Find the visible ones of `count` keys from `from` on; whether there are any for m rows.
  bool update(int64_t m, int64_t from, int64_t count) {
    bool any = false;
    for (int64_t first = 0; first < m; first += ROWS_AT_ONCE<E>) {
      const int64_t rows = least(ROWS_AT_ONCE<E>, m - first);
      const int64_t causal = a.causal ? least(count, a.causal_keys + first + rows - 1 - from) : count;
      const VisibleKeys keys = visible[first / ROWS_AT_ONCE<E>] = of(first, rows, from, causal);
      any |= keys.from < keys.to;
    }
    return any;
  }

  // The visible ones of `count` keys from `from` on, relative to `from`.
  VisibleKeys of(int64_t first, int64_t rows, int64_t from, int64_t count) {
    if (!may_skip || count <= 0) return {0, count};
    return visible_keys(a.mask.from(first, from), rows, count, [&] { return limit(first, rows); });
  }

  float limit(int64_t first, int64_t rows) {
    int8_t& known = has_visible[first / ROWS_AT_ONCE<E>];
    if (known < 0) {
      const int64_t causal = a.causal ? least(n, a.causal_keys + first) : n;
      known = every_row_has_visible(a.mask(first, 0), a.mask.row, rows, causal);
    }
    if (value_norm == -1) key_norm = norm(a.keys, n, D), value_norm = norm(a.values, n, D);
    const float max_score = abs(a.scale) * norm(a.queries.from(first, 0), rows, D) * key_norm;
    return skip_limit(max_score, value_norm, a.masking != Masking::ADDS, known);
  }
};

// Attention of m rows, at most M, to n keys. D: columns, and terms of the first product.
template <int D, int M, int KEYS, class E, class Added>
inline void attend(int64_t m, int64_t n, const Attention<E, Added>& a) {
  static_assert(KEYS % COLUMNS == 0 && KEY_GROUP % COLUMNS == 0);
  using F = Factor<E>;
  constexpr int WIDTH = panels_of(D);
  constexpr int UNITS = units_of<E>(D), PAIRS = units_of<E>(KEYS);  // of a query, and of a column of values
  constexpr int STEP = KEYS + COLUMNS;  // so that rows are in different sets of the L1 cache
  alignas(64) float keys[KEYS * UNITS], values[PAIRS * WIDTH], scores[ROWS_AT_ONCE<E> * STEP], sums[M * WIDTH];
  SoftmaxState softmax[M];
  BlockState state;
  for (int64_t i = 0; i < m; i++) softmax[i] = SoftmaxState::of(a.sinks.at ? *a.sinks(i, 0) : -inf<float>);
  const bool few = m <= ROWS_IN_PLACE;
  const bool keys_in_place = few && a.keys.column == 1 && a.queries.column == 1;
  const bool values_in_place = few && a.values.column == 1 && D % COLUMNS == 0;
  const int64_t last = a.causal ? least(n, a.causal_keys + m - 1) : n;
  KeyVisibility<D, M, E, Added> visibility(a, m, last);
  bool begun[M / ROWS_AT_ONCE<E> + 1] = {};  // whether a group of rows has sums already
  for (int64_t from = 0; from < last; from += KEYS) {
    const int64_t count = least(KEYS, last - from);
    const KeyBlock whole{keys_in_place ? nullptr : keys, values_in_place ? nullptr : values, from};
    if (!visibility.update(m, from, count)) continue;
    if (!keys_in_place) pack_columns(transposed(a.keys.from(from, 0)), D, count, keys, COLUMNS * UNITS);
    if (!values_in_place) pack_columns(a.values.from(from, 0), count, D, values, COLUMNS * PAIRS);
    for (int64_t first = 0; first < m; first += ROWS_AT_ONCE<E>) {
      const int64_t rows = least(ROWS_AT_ONCE<E>, m - first);
      const VisibleKeys part = visibility.visible[first / ROWS_AT_ONCE<E>];
      bool& more = begun[first / ROWS_AT_ONCE<E>];
      const int64_t keys_used = part.to - part.from;
      if (keys_used <= 0) continue;
      const KeyBlock block = whole.after<E, D>(part.from);
      const auto keys_of_row = [&](int64_t row) PV_INLINE {
        return a.causal ? least(keys_used, a.causal_keys + row - block.from) : keys_used;
      };
      score<D, STEP>(state, a, block, first, rows, keys_used, scores);
      for (int64_t i = 0; i < rows; i++) {
        float* row = scores + i * STEP;
        const int64_t own = keys_of_row(first + i);
        if (own > 0) {
          const float factor = softmax_row(a, first + i, block.from, own, row, softmax[first + i]);
          if (more) rescale<WIDTH>(sums + (first + i) * WIDTH, factor);
        }
        for (int64_t j = own < 0 ? 0 : own; j < units_of<E>(keys_used) * TERMS<E>; j++) ((F*)row)[j] = F{};
      }
      add_values<D, KEYS, STEP>(state, a, block, rows, keys_used, scores, {sums + first * WIDTH, WIDTH, more});
      more = true;
    }
  }
  for (int64_t i = 0; i < m; i++) {
    const float sum = softmax[i].sum;
    const bool empty = a.zero && sum == 0;
    if (!begun[i / ROWS_AT_ONCE<E>]) std::memset(sums + i * WIDTH, 0, WIDTH * sizeof(float));
    store_row<D>(sums + i * WIDTH, empty ? 1.0f : 1.0f / sum, a.out.from(i, 0), false);
    if (!a.logsumexp.at) continue;
    const float logarithm = libm::log(sum), max = softmax[i].max;
    if (a.logarithm.at) *a.logarithm(i, 0) = logarithm;
    const float base = max == -inf<float> ? 0.0f : max;
    *a.logsumexp(i, 0) = a.logarithm.at ? base : empty ? 0.0f : max + logarithm;
  }
}

}  // namespace pv
