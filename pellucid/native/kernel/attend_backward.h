// Gradients of attention, for the heads of queries that share one head of keys, without a matrix of all scores:
//
//     weights = exp(scale * q @ k^T + mask - logsumexp)
//     grad v  = weights^T @ grad out
//     changes = weights * (grad out @ v^T - the sum of grad out * out of each row) * scale
//     grad q  = changes @ k
//     grad k  = changes^T @ q
//
// Where a mask stands in place of a score, its change is zero. Where forward kept the greatest score and the logarithm
// of a sum relative to it, both are subtracted in turn: beside a greatest score of -1e30 a logarithm would be lost.
//
// Keys are taken in blocks (KEYS), which are packed once and whose gradients are summed in cache over all rows. Rows are
// taken M at a time; for QUERIES of them scores become weights, and grad out @ v^T changes, in place. The gradient of
// queries is summed in memory, in f32, block by block of keys. With a causal mask, keys beyond the last row of QUERIES,
// and rows before the first of QUERIES keys, are left out; keys behind the last one that a mask shows to some of M rows
// are so too (shown.h).
//
// Types are those of attend.h: in bf16 weights and changes are rounded to it, as ATen's are.
namespace pv {

// A matrix for each of the heads that share keys, `step` elements apart.
template <class M> struct PerHead {
  M first;
  int64_t step;
  PV_FN M operator[](int64_t head) const { return {first.at + head * step, first.row, first.column}; }
};

// What forward read and wrote, see `Attention`, the gradient of its result, and the gradients that are written.
template <class E, class Added> struct AttentionBackward {
  PerHead<Matrix<E>> queries;
  Matrix<E> keys, values;
  PerHead<Matrix<Added>> mask;
  Masking masking;
  float scale;
  bool causal;
  int64_t seen;
  PerHead<Matrix<E>> out, grad_out;
  PerHead<Matrix<float>> logsumexp, logarithm;
  PerHead<Results<float>> grad_queries;
  Results<E> grad_keys, grad_values;
};

// The sum of the products of two rows of D elements.
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

// n scores of a row become weights, and n of grad out @ v^T changes, both of type F and in the same memory.
template <class F>
PV_SHARED void weigh_changes(
    float* scores, float* changes, int64_t n, float factor, float base, float logarithm, float delta, float scale) {
  constexpr int W = COLUMN;
  if (factor != 1 && !(abs(base) < ROUNDED)) {
    scale_scores(scores, n, factor);
    factor = 1;
  }
  const auto times = splat<W>(factor), less = splat<W>(-base), over = splat<W>(logarithm);
  const auto before = splat<W>(delta), after = splat<W>(scale);
  steps<W>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto weight = exp_of_negative(sub(fma(load<float>(scores + j, l), times, less), over));
    const auto change = mul(mul(weight, sub(load<float>(changes + j, l), before)), after);
    store<F>((F*)scores + j, weight, l);
    store<F>((F*)changes + j, change, l);
  });
}

// n changes, of type F, are zero where the mask stands in place of scores.
template <class F, class Added>
[[gnu::noinline]] inline void drop_replaced(
    float* changes, int64_t n, const Added* mask, int64_t step, Masking masking) {
  F* const to = (F*)changes;
  const bool hides = masking == Masking::HIDES;
  const float number = hides ? -inf<float> : 0.0f;
  if (step != 1) {
    for (int64_t j = 0; j < n; j++)
      if ((load(mask + j * step) == number) == hides) to[j] = F{};
    return;
  }
  const auto zero = splat<COLUMN>(0.0f), compared = splat<COLUMN>(number);
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE {
    const auto change = load((const F*)to + j, l);
    const auto is = eq(load(mask + j, l), compared);
    store<F>(to + j, hides ? where(is, zero, change) : where(is, change, zero), l);
  });
}

// The block of rows and keys that is at work. weights, changes: M rows, STEP floats apart.
template <int M, int STEP> struct RowBlock {
  int64_t head, first, rows, from, count;
  float *weights, *changes;
  // How many keys of the block the row sees, and all rows up to it.
  template <class A> PV_FN int64_t visible(const A& a, int64_t row) const {
    return a.causal ? least(count, a.seen + first + row - from) : count;
  }
  // The first row, in whole QUERIES, that sees the key.
  template <class E, class Added> PV_FN int64_t first_to_see(const AttentionBackward<E, Added>& a, int64_t key) const {
    int64_t row = 0;
    while (a.causal && visible(a, row + ROWS_AT_ONCE<E> - 1) <= key) row += ROWS_AT_ONCE<E>;
    return row;
  }
};

// Weights and changes of QUERIES rows from `row` on, of `most` keys, and zeros up to whole QUERIES keys and a whole unit
// of rows.
template <int D, int M, int STEP, class E, class Added>
PV_FN void weigh_rows(
    Beside& beside, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, int64_t row, int64_t some,
    int64_t most, const float* keys, const float* values) {
  using F = Factor<E>;
  const int64_t at = block.first + row;
  const Matrix<E> out = a.out[block.head].from(at, 0), grad_out = a.grad_out[block.head].from(at, 0);
  const Matrix<Added> mask = a.mask[block.head];
  float *weights = block.weights + row * STEP, *changes = block.changes + row * STEP;
  times_panels<D, STEP>(beside, a.queries[block.head].from(at, 0), some, keys, most, weights);
  times_panels<D, STEP>(beside, grad_out, some, values, most, changes);
  const int64_t filled = (most + ROWS_AT_ONCE<E> - 1) / ROWS_AT_ONCE<E> * ROWS_AT_ONCE<E>;
  for (int64_t i = 0; i < some + some % TERMS<E>; i++, weights += STEP, changes += STEP) {
    const int64_t own = i < some ? block.visible(a, row + i) : 0;
    if (own > 0) {
      const Added* added = mask.at ? mask(at + i, block.from) : nullptr;
      if (added) add_mask(weights, own, a.scale, added, mask.column, a.masking);
      const float base = *a.logsumexp[block.head](at + i, 0);
      const float logarithm = a.logarithm.first.at ? *a.logarithm[block.head](at + i, 0) : 0.0f;
      const float delta = dot<D>(out.from(i, 0), grad_out.from(i, 0));
      weigh_changes<F>(weights, changes, own, added ? 1.0f : a.scale, base, logarithm, delta, a.scale);
      if (added && a.masking != Masking::ADDS) drop_replaced<F>(changes, own, added, mask.column, a.masking);
    }
    for (int64_t j = own < 0 ? 0 : own; j < filled; j++) ((F*)weights)[j] = ((F*)changes)[j] = F{};
  }
}

// The gradients of QUERIES rows from `row` on.
template <int D, int M, int STEP, class E, class Added>
PV_FN void add_grad_queries(
    Beside& beside, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, int64_t row, int64_t some,
    int64_t most, const float* keys, int64_t depth) {
  using F = Factor<E>;
  constexpr int WIDTH = panels_of(D);
  alignas(64) float sums[ROWS_AT_ONCE<E> * WIDTH];
  const Matrix<F> changes{(const F*)(block.changes + row * STEP), STEP * TERMS<E>, 1};
  if (most <= 0) std::memset(sums, 0, sizeof sums);
  for (int64_t j = 0; most > 0 && j < D; j += COLUMNS)
    panel<D>(beside, some, D - j, units_of<E>(most), LeftRows(changes), Rows{keys + j * depth, COLUMNS},
             {sums + j, WIDTH, false});
  const auto to = a.grad_queries[block.head].from(block.first + row, 0);
  for (int64_t i = 0; i < some; i++) put_row<D>(sums + i * WIDTH, 1.0f, to.from(i, 0), block.from > 0);
}

// sums[keys, D] += rows[rows, keys]^T @ right[rows, D]. rows: in the memory of weights or changes; right: panels.
template <int D, int M, int STEP, class E, class Added>
PV_FN void add_by_key(
    Beside& beside, const AttentionBackward<E, Added>& a, const RowBlock<M, STEP>& block, const float* rows,
    const float* right, float* sums) {
  using F = Factor<E>;
  constexpr int T = TERMS<E>, DEPTH_OF_ROWS = units_of<E>(M), WIDTH = panels_of(D);
  const int64_t last = block.visible(a, block.rows - 1), piece = a.causal ? ROWS_AT_ONCE<E> : last;
  alignas(64) float units[T > 1 ? DEPTH_OF_ROWS * STEP : 1];  // in which two rows are side by side
  Matrix<F> left{(const F*)rows, 1, STEP};
  if constexpr (BY_AMX<F>) {
    copy_rows(Matrix<F>{(const F*)rows, 1, T * STEP}, last, block.rows, units, DEPTH_OF_ROWS);
    left = {(const F*)units, T * DEPTH_OF_ROWS, 1};
  } else if constexpr (T > 1) {
    for (int64_t i = 0; i < block.rows; i += T)
      for (int64_t j = 0; j < last; j += COLUMN)
        write_column(units + i / T * STEP + j, read_across((const F*)(rows + i * STEP) + j, T * STEP));
    left = {(const F*)units, T, STEP};
  }
  for (int64_t key = 0; key < last; key += piece) {
    const int64_t row = block.first_to_see(a, key);
    const LeftRows some = left.from(key, row);
    for (int64_t j = 0; j < D; j += COLUMNS)
      panel<D>(beside, least(piece, last - key), D - j, units_of<E>(block.rows - row), some,
               Rows{right + j * DEPTH_OF_ROWS + row / T * COLUMNS, COLUMNS}, {sums + key * WIDTH + j, WIDTH, true});
  }
}

// The keys that rows see, as in attend.h, but that those up to the last of them count.
template <int D, class E, class Added> struct SightOfGradients {
  const AttentionBackward<E, Added>& a;
  int64_t n;
  float key = -1, value = -1;  // norms; -1: not known

  // How many of `count` keys from `from` on rows of a head see.
  int64_t of(int64_t head, int64_t first, int64_t rows, int64_t from, int64_t count) {
    if (!a.mask.first.at || a.mask.first.column != 1) return count;
    const auto mask = a.mask[head].from(first, from);
    const Shown shown = seen_keys(mask, rows, count, [&] { return below(head, first, rows); });
    return shown.from < shown.to ? shown.to : 0;
  }

  // So that both weights and changes of hidden keys are 0.
  float below(int64_t head, int64_t first, int64_t rows) {
    const int64_t seen = a.causal ? least(n, a.seen + first) : n;
    if (!each_sees(a.mask[head](first, 0), a.mask.first.row, rows, seen)) return nan<float>;
    if (value == -1) key = norm(a.keys, n, D), value = norm(a.values, n, D);
    const auto of_rows = [&](const PerHead<Matrix<E>>& all) PV_INLINE { return norm(all[head].from(first, 0), rows, D); };
    const float change = of_rows(a.grad_out) * (value + of_rows(a.out));
    return hides_below(abs(a.scale) * of_rows(a.queries) * key, change, false, true);  // a change is times keys, too
  }
};

// All of `heads` heads of m rows, and of n keys. D: columns, and terms of scores.
template <int D, int M, int KEYS, class E, class Added>
inline void attend_backward(int64_t heads, int64_t m, int64_t n, const AttentionBackward<E, Added>& a) {
  static_assert(KEYS % COLUMNS == 0 && M % ROWS_AT_ONCE<E> == 0);
  constexpr int WIDTH = panels_of(D), STEP = KEYS + COLUMNS;  // see `attend`
  constexpr int UNITS = units_of<E>(D), PAIRS = units_of<E>(KEYS), DEPTH_OF_ROWS = units_of<E>(M);
  alignas(64) float keys[KEYS * UNITS], values[KEYS * UNITS], key_rows[PAIRS * WIDTH];
  alignas(64) float grad_keys[KEYS * WIDTH], grad_values[KEYS * WIDTH];
  alignas(64) float queries[DEPTH_OF_ROWS * WIDTH], grad_out[DEPTH_OF_ROWS * WIDTH];
  alignas(64) float weights[M * STEP], changes[M * STEP];
  Beside beside;
  SightOfGradients<D, E, Added> sight{a, n};
  for (int64_t from = 0; from == 0 || from < n; from += KEYS) {
    const int64_t count = least(KEYS, n - from);
    pack_columns(transposed(a.keys.from(from, 0)), D, count, keys, COLUMNS * UNITS);
    pack_columns(transposed(a.values.from(from, 0)), D, count, values, COLUMNS * UNITS);
    pack_columns(a.keys.from(from, 0), count, D, key_rows, COLUMNS * PAIRS);
    std::memset(grad_keys, 0, sizeof grad_keys);
    std::memset(grad_values, 0, sizeof grad_values);
    for (int64_t head = 0; head < heads; head++)
      for (int64_t first = 0; first < m; first += M) {
        const int64_t rows = least(M, m - first), shown = sight.of(head, first, rows, from, count);
        const RowBlock<M, STEP> block{head, first, rows, from, shown, weights, changes};
        const bool seen = block.visible(a, block.rows - 1) > 0;
        for (int64_t row = 0; row < block.rows && (seen || from == 0); row += ROWS_AT_ONCE<E>) {
          const int64_t some = least(ROWS_AT_ONCE<E>, block.rows - row), most = block.visible(a, row + some - 1);
          if (most > 0) weigh_rows<D>(beside, a, block, row, some, most, keys, values);
          if (most > 0 || from == 0) add_grad_queries<D>(beside, a, block, row, some, most, key_rows, PAIRS);
        }
        if (!seen) continue;
        pack_columns(a.queries[head].from(first, 0), block.rows, D, queries, COLUMNS * DEPTH_OF_ROWS);
        pack_columns(a.grad_out[head].from(first, 0), block.rows, D, grad_out, COLUMNS * DEPTH_OF_ROWS);
        add_by_key<D>(beside, a, block, weights, grad_out, grad_values);
        add_by_key<D>(beside, a, block, changes, queries, grad_keys);
      }
    for (int64_t i = 0; i < count; i++) {
      put_row<D>(grad_keys + i * WIDTH, 1.0f, a.grad_keys.from(from + i, 0), false);
      put_row<D>(grad_values + i * WIDTH, 1.0f, a.grad_values.from(from + i, 0), false);
    }
  }
}

}  // namespace pv
