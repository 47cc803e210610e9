// Gradients of attention, for the heads of queries that share one head of keys, without a matrix of all scores:
//
//     weights = exp(scale * q @ k^T + mask - logsumexp)
//     grad v  = weights^T @ grad out
//     grad s  = weights * (grad out @ v^T - the sum of grad out * out of each row) * scale
//     grad q  = grad s @ k
//     grad k  = grad s^T @ q
//
// Where a mask replaces a score, grad s is zero. If forward saved the maximum score and the logarithm of the sum
// relative to it, both are subtracted one after the other: added to a maximum of -1e30, the logarithm would be lost.
//
// Keys are processed in blocks (KEYS), which are packed once and whose gradients are summed in cache over all rows.
// Rows are processed M at a time; for QUERIES of them scores become weights, and grad out @ v^T becomes grad s, in
// place. The gradient of queries is summed in memory, in f32, block by block of keys. With a causal mask, keys past the
// last of QUERIES rows, and rows before the first that attends to QUERIES keys, are skipped. So are the keys after the
// last one that is visible to some of M rows (shown.h).
//
// Types are those of attend.h: in bf16 weights and grad s are rounded to it, as ATen's are.
namespace pv {

// A matrix for each of the heads that share keys. step: elements from one head's matrix to the next.
template <class M> struct PerHead {
  M first;
  int64_t step;
  PV_FN M operator[](int64_t head) const { return {first.at + head * step, first.row, first.column}; }
};

// The operands and results of forward (see `Attention`), the gradient of its result, and the gradients to compute.
template <class E, class Added> struct AttentionBackward {
  PerHead<Matrix<E>> queries;
  Matrix<E> keys, values;
  PerHead<Matrix<Added>> mask;
  Masking masking;
  float scale;
  bool causal;
  int64_t causal_keys;
  PerHead<Matrix<E>> out, grad_out;
  PerHead<Matrix<float>> logsumexp, logarithm;
  PerHead<OutputMatrix<float>> grad_queries;
  OutputMatrix<E> grad_keys, grad_values;
};

// The dot product of two rows of D elements.
template <int D, class E> PV_FN float dot(const Matrix<E>& a, const Matrix<E>& b) {
  if (a.column == 1 && b.column == 1) {
    Acc<Sum, Vec<float, COLUMN>> sum;
    steps<COLUMN>(0, D, [&](auto l, int64_t j) PV_INLINE { sum.add(mul(load(a.at + j, l), load(b.at + j, l)), l); });
    return total<Sum>(sum.value());
  }
  float sum = 0;
  for (int64_t j = 0; j < D; j++) sum = __builtin_fmaf(load(a(0, j)), load(b(0, j)), sum);
  return sum;
}

// Turn n scores of a row into weights, and n elements of grad out @ v^T into gradients of scores; in place, as type F.
template <class F>
PV_SHARED void weights_and_grads(
    float* scores, float* grad_scores, int64_t n, float factor, float base, float logarithm, float delta, float scale) {
  constexpr int W = COLUMN;
  if (factor != 1 && !(abs(base) < LARGE_SCORE)) {
    scale_scores(scores, n, factor);
    factor = 1;
  }
  const auto factors = splat<W>(factor), negative_base = splat<W>(-base), logarithms = splat<W>(logarithm);
  const auto deltas = splat<W>(delta), scales = splat<W>(scale);
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto weight = exp_of_negative(sub(fma(load<float>(scores + j, l), factors, negative_base), logarithms));
    const auto grad = mul(mul(weight, sub(load<float>(grad_scores + j, l), deltas)), scales);
    store<F>((F*)scores + j, weight, l);
    store<F>((F*)grad_scores + j, grad, l);
  });
}

// Zero those of n gradients of scores, of type F, whose score the mask replaced.
template <class F, class Added>
[[gnu::noinline]] inline void zero_replaced(
    float* grad_scores, int64_t n, const Added* mask, int64_t step, Masking masking) {
  F* const to = (F*)grad_scores;
  const bool hides = masking == Masking::HIDES;
  const float compared = hides ? -inf<float> : 0.0f;
  const auto zero = splat<COLUMN>(0.0f), all_compared = splat<COLUMN>(compared);
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto grad = load((const F*)to + j, l);
    const auto equal = eq(load_strided<COLUMN>(mask + j * step, step, l), all_compared);
    store<F>(to + j, hides ? where(equal, zero, grad) : where(equal, grad, zero), l);
  });
}

// The current block of rows and keys. weights, grad_scores: M rows of STEP floats.
template <int M, int STEP> struct RowBlock {
  int64_t head, first, rows, from, count;
  float *weights, *grad_scores;
  // Number of keys of the block that the row attends to; rows before it attend to no more.
  template <class A> PV_FN int64_t visible(const A& a, int64_t row) const {
    return a.causal ? least(count, a.causal_keys + first + row - from) : count;
  }
  // The first group of ROWS_AT_ONCE rows with a row that attends to the key.
  template <class E, class Added>
  PV_FN int64_t first_row_of_key(const AttentionBackward<E, Added>& a, int64_t key) const {
    int64_t row = 0;
    while (a.causal && visible(a, row + ROWS_AT_ONCE<E> - 1) <= key) row += ROWS_AT_ONCE<E>;
    return row;
  }
};

// Weights and gradients of scores for `count` rows from `row` on, up to ROWS_AT_ONCE, and `keys_used` keys; with zeros
// up to a multiple of ROWS_AT_ONCE keys and a whole unit of rows.
template <int D, int M, int STEP, class E, class Added>
PV_FN void compute_rows(
    BlockState& state, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, int64_t row, int64_t count,
    int64_t keys_used, const float* keys, const float* values) {
  using F = Factor<E>;
  const int64_t at = block.first + row;
  const Matrix<E> out = a.out[block.head].from(at, 0), grad_out = a.grad_out[block.head].from(at, 0);
  const Matrix<Added> mask = a.mask[block.head];
  float *weights = block.weights + row * STEP, *grad_scores = block.grad_scores + row * STEP;
  multiply_by_panels<D, STEP>(state, a.queries[block.head].from(at, 0), count, keys, keys_used, weights);
  multiply_by_panels<D, STEP>(state, grad_out, count, values, keys_used, grad_scores);
  const int64_t filled = (keys_used + ROWS_AT_ONCE<E> - 1) / ROWS_AT_ONCE<E> * ROWS_AT_ONCE<E>;
  for (int64_t i = 0; i < count + count % TERMS<E>; i++, weights += STEP, grad_scores += STEP) {
    const int64_t own = i < count ? block.visible(a, row + i) : 0;
    if (own > 0) {
      const Added* added = mask.at ? mask(at + i, block.from) : nullptr;
      if (added) add_mask(weights, own, a.scale, added, mask.column, a.masking);
      const float base = *a.logsumexp[block.head](at + i, 0);
      const float logarithm = a.logarithm.first.at ? *a.logarithm[block.head](at + i, 0) : 0.0f;
      const float delta = dot<D>(out.from(i, 0), grad_out.from(i, 0));
      weights_and_grads<F>(weights, grad_scores, own, added ? 1.0f : a.scale, base, logarithm, delta, a.scale);
      if (added && a.masking != Masking::ADDS) zero_replaced<F>(grad_scores, own, added, mask.column, a.masking);
    }
    for (int64_t j = own < 0 ? 0 : own; j < filled; j++) ((F*)weights)[j] = ((F*)grad_scores)[j] = F{};
  }
}

// Add to the gradients of `count` queries from `row` on, up to ROWS_AT_ONCE.
template <int D, int M, int STEP, class E, class Added>
PV_FN void add_grad_queries(
    BlockState& state, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, int64_t row, int64_t count,
    int64_t keys_used, const float* keys, int64_t depth) {
  using F = Factor<E>;
  constexpr int WIDTH = panels_of(D);
  alignas(64) float sums[ROWS_AT_ONCE<E> * WIDTH];
  const Matrix<F> grad_scores{(const F*)(block.grad_scores + row * STEP), STEP * TERMS<E>, 1};
  if (keys_used <= 0) std::memset(sums, 0, sizeof sums);
  for (int64_t j = 0; keys_used > 0 && j < D; j += COLUMNS)
    panel<D>(state, count, D - j, units_of<E>(keys_used), LeftRows(grad_scores), Rows{keys + j * depth, COLUMNS},
             {sums + j, WIDTH, false});
  const auto to = a.grad_queries[block.head].from(block.first + row, 0);
  for (int64_t i = 0; i < count; i++) store_row<D>(sums + i * WIDTH, 1.0f, to.from(i, 0), block.from > 0);
}

// sums[keys, D] += left[rows, keys]^T @ right[rows, D]. left: weights or grad_scores of the block; right: panels.
template <int D, int M, int STEP, class E, class Added>
PV_FN void add_grads_by_key(
    BlockState& state, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, const float* left,
    const float* right, float* sums) {
  using F = Factor<E>;
  constexpr int T = TERMS<E>, DEPTH_OF_ROWS = units_of<E>(M), WIDTH = panels_of(D);
  const int64_t last = block.visible(a, block.rows - 1), piece = a.causal ? ROWS_AT_ONCE<E> : last;
  alignas(64) float units[T > 1 ? DEPTH_OF_ROWS * STEP : 1];  // each of the terms of two rows
  Matrix<F> transposed_left{(const F*)left, 1, STEP};
  if constexpr (BY_AMX<F>) {
    copy_rows(Matrix<F>{(const F*)left, 1, T * STEP}, last, block.rows, units, DEPTH_OF_ROWS);
    transposed_left = {(const F*)units, T * DEPTH_OF_ROWS, 1};
  } else if constexpr (T > 1) {
    for (int64_t i = 0; i < block.rows; i += T)
      for (int64_t j = 0; j < last; j += COLUMN)
        write_column(units + i / T * STEP + j, read_across((const F*)(left + i * STEP) + j, T * STEP));
    transposed_left = {(const F*)units, T, STEP};
  }
  for (int64_t key = 0; key < last; key += piece) {
    const int64_t row = block.first_row_of_key(a, key);
    const LeftRows left_rows = transposed_left.from(key, row);
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(state, least(piece, last - key), D - j, units_of<E>(block.rows - row), left_rows,
               Rows{right + j * DEPTH_OF_ROWS + row / T * COLUMNS, COLUMNS}, {sums + key * WIDTH + j, WIDTH, true});
  }
}

// Like `KeyVisibility`, but only keys after the last visible one are skipped.
template <int D, class E, class Added> struct BackwardKeyVisibility {
  const AttentionBackward<E, Added>& a;
  int64_t n;
  float key_norm = -1, value_norm = -1;  // -1: not computed yet

  // Number of keys up to the last visible one, of `count` keys from `from` on, for rows of a head.
  int64_t of(int64_t head, int64_t first, int64_t rows, int64_t from, int64_t count) {
    if (!a.mask.first.at || a.mask.first.column != 1) return count;
    const auto mask = a.mask[head].from(first, from);
    const VisibleKeys visible = visible_keys(mask, rows, count, [&] { return limit(head, first, rows); });
    return visible.from < visible.to ? visible.to : 0;
  }

  // The mask value up to which both the weight of a key and the gradient of its score are 0; NaN: skip none.
  float limit(int64_t head, int64_t first, int64_t rows) {
    const int64_t causal = a.causal ? least(n, a.causal_keys + first) : n;
    if (!every_row_has_visible(a.mask[head](first, 0), a.mask.first.row, rows, causal)) return nan<float>;
    if (value_norm == -1) key_norm = norm(a.keys, n, D), value_norm = norm(a.values, n, D);
    const auto of_rows = [&](const PerHead<Matrix<E>>& all) PV_INLINE {
      return norm(all[head].from(first, 0), rows, D);
    };
    const float max_grad = of_rows(a.grad_out) * (value_norm + of_rows(a.out));
    // Not `replaces`: keys must be finite too, since grad s is multiplied by them.
    return skip_limit(abs(a.scale) * of_rows(a.queries) * key_norm, max_grad, false, true);
  }
};

// The gradients of `heads` heads of m rows, and of the n keys that these share. D: columns, and terms of scores.
template <int D, int M, int KEYS, class E, class Added>
inline void attend_backward(int64_t heads, int64_t m, int64_t n, const AttentionBackward<E, Added>& a) {
  static_assert(KEYS % COLUMNS == 0 && M % ROWS_AT_ONCE<E> == 0);
  constexpr int WIDTH = panels_of(D), STEP = KEYS + COLUMNS;  // see `attend`
  constexpr int UNITS = units_of<E>(D), PAIRS = units_of<E>(KEYS), DEPTH_OF_ROWS = units_of<E>(M);
  alignas(64) float keys[KEYS * UNITS], values[KEYS * UNITS], key_rows[PAIRS * WIDTH];
  alignas(64) float grad_keys[KEYS * WIDTH], grad_values[KEYS * WIDTH];
  alignas(64) float queries[DEPTH_OF_ROWS * WIDTH], grad_out[DEPTH_OF_ROWS * WIDTH];
  alignas(64) float weights[M * STEP], grad_scores[M * STEP];
  BlockState state;
  BackwardKeyVisibility<D, E, Added> visibility{a, n};
  for (int64_t from = 0; from == 0 || from < n; from += KEYS) {
    const int64_t count = least(KEYS, n - from);
    pack_columns(transposed(a.keys.from(from, 0)), D, count, keys, COLUMNS * UNITS);
    pack_columns(transposed(a.values.from(from, 0)), D, count, values, COLUMNS * UNITS);
    pack_columns(a.keys.from(from, 0), count, D, key_rows, COLUMNS * PAIRS);
    std::memset(grad_keys, 0, sizeof grad_keys);
    std::memset(grad_values, 0, sizeof grad_values);
    for (int64_t head = 0; head < heads; head++)
      for (int64_t first = 0; first < m; first += M) {
        const int64_t rows = least(M, m - first), visible = visibility.of(head, first, rows, from, count);
        const RowBlock<M, STEP> block{head, first, rows, from, visible, weights, grad_scores};
        const bool any = block.visible(a, block.rows - 1) > 0;
        for (int64_t row = 0; row < block.rows && (any || from == 0); row += ROWS_AT_ONCE<E>) {
          const int64_t group = least(ROWS_AT_ONCE<E>, block.rows - row), used = block.visible(a, row + group - 1);
          if (used > 0) compute_rows<D>(state, a, block, row, group, used, keys, values);
          if (used > 0 || from == 0) add_grad_queries<D>(state, a, block, row, group, used, key_rows, PAIRS);
        }
        if (!any) continue;
        pack_columns(a.queries[head].from(first, 0), block.rows, D, queries, COLUMNS * DEPTH_OF_ROWS);
        pack_columns(a.grad_out[head].from(first, 0), block.rows, D, grad_out, COLUMNS * DEPTH_OF_ROWS);
        add_grads_by_key<D>(state, a, block, weights, grad_out, grad_values);
        add_grads_by_key<D>(state, a, block, grad_scores, queries, grad_keys);
      }
    for (int64_t i = 0; i < count; i++) {
      store_row<D>(grad_keys + i * WIDTH, 1.0f, a.grad_keys.from(from + i, 0), false);
      store_row<D>(grad_values + i * WIDTH, 1.0f, a.grad_values.from(from + i, 0), false);
    }
  }
}

}  // namespace pv
