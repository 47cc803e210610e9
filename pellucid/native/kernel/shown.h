// Finds the keys that an attention mask leaves visible to a group of rows, so that masked-out keys are skipped.
//
// A key may be skipped if its weight is 0 in f32 and its value is finite: 0 times infinity would be NaN. If the mask is
// -inf, the weight is 0 for any finite score. It is 0 too if the mask is far below the one of another key of the row
// (as the lowest number of a type is), since the magnitude of a score is at most the product of the norms of queries
// and keys.
namespace pv {

// Number of keys that are skipped at a time: whole panels.
constexpr int KEY_GROUP = 64;
// A key is visible if its mask is above VISIBLE_ABOVE. exp(-UNDERFLOW_GAP) is 0 in f32.
constexpr float VISIBLE_ABOVE = -1000.0f, UNDERFLOW_GAP = 200.0f;

// The range of keys from the first to the last one that is visible to some row, and the maximum of the mask over the
// groups of keys that were found masked out.
struct VisibleKeys {
  int64_t from, to;
  float max_masked = -inf<float>;
};

// The maximum of n mask values, NaN if one is; or just the first value if that is above `limit` or NaN.
template <class Added>
PV_FN float max_of(const Added* mask, int64_t n, float limit) {
  if (!(load(mask) <= limit)) return load(mask);
  Acc<Max, Vec<float, COLUMN>> max;
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE { max.add(load(mask + j, l), l); });
  return total<Max>(max.value());
}

// The range of those of n keys whose mask is above `limit`, or NaN, in some row. row: elements from one row to the
// next.
template <class Added>
PV_SHARED VisibleKeys keys_above(const Added* mask, int64_t row, int64_t rows, int64_t n, float limit) {
  const int64_t groups = (n + KEY_GROUP - 1) / KEY_GROUP;
  float max_masked = -inf<float>;
  const auto masked = [&](int64_t i, int64_t group) PV_INLINE {
    const int64_t from = group * KEY_GROUP;
    const float max = max_of(mask + i * row + from, least(KEY_GROUP, n - from), limit);
    if (max <= limit) max_masked = maximum(max_masked, max);
    return max <= limit;
  };
  int64_t from = groups, to = 0;
  for (int64_t i = 0; i < rows; i++) {
    int64_t first = 0, last = groups;
    while (first < from && masked(i, first)) first++;
    while (last > to && masked(i, last - 1)) last--;
    from = first, to = last;
  }
  return {from * KEY_GROUP, least(to * KEY_GROUP, n), max_masked};
}

// The range of those of n keys that some row attends to. limit: returns `skip_limit`; called only if a key may be
// masked out.
template <class Added, class Limit>
PV_FN VisibleKeys visible_keys(const Matrix<Added>& mask, int64_t rows, int64_t n, Limit limit) {
  const VisibleKeys visible = keys_above(mask.at, mask.row, rows, n, VISIBLE_ABOVE);
  if (visible.from == 0 && visible.to == n) return visible;
  const float skipped_to = limit();
  return visible.max_masked <= skipped_to ? visible : keys_above(mask.at, mask.row, rows, n, skipped_to);
}

// Whether each row has a visible key among the first n.
template <class Added>
PV_SHARED bool every_row_has_visible(const Added* mask, int64_t row, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    while (j < n && max_of(mask + i * row + j, least(KEY_GROUP, n - j), VISIBLE_ABOVE) <= VISIBLE_ABOVE) j += KEY_GROUP;
    if (j >= n) return false;
  }
  return true;
}

// The Frobenius norm; infinite or NaN if an element is.
template <class E>
PV_SHARED float norm(const Matrix<E>& a, int64_t rows, int64_t columns) {
  constexpr int W = 4 * COLUMN;
  Acc<Sum, Vec<float, W>> sum;
  for (int64_t i = 0; i < rows; i++)
    steps<W>(0, columns, [&](auto l, int64_t j) PV_INLINE {
      const auto x = load_strided<W>(a(i, j), a.column, l);
      sum.add(mul(x, x), l);
    });
  return libm::sqrt(total<Sum>(sum.value()));
}

// The mask value up to which a key can be skipped; NaN if none can. max_score: bound of the magnitude of scores. value:
// skipping requires that it is finite. replaces: the mask replaces scores. has_visible: each row has a visible key.
PV_FN float skip_limit(float max_score, float value, bool replaces, bool has_visible) {
  const bool bounded = max_score < 1e37f;
  if (!(value < inf<float>) || !(bounded || replaces)) return nan<float>;
  // A little more than twice the bound, because norms are rounded.
  return bounded && has_visible ? VISIBLE_ABOVE - UNDERFLOW_GAP - 2.001f * max_score : -inf<float>;
}

}  // namespace pv
