// Which keys a mask hides from some rows of an attention, so that nothing is computed of them.
//
// A key may be left out if its weight is 0 in f32 and its value is finite: 0 times infinity would be NaN. Where the mask
// is -inf this is so for any finite score; so it is where the mask is far below what it adds to another key of the row,
// as the lowest number of a type is, since no score is greater than the product of the norms of queries and keys.
namespace pv {

// Keys are left out so many at a time: whole panels.
constexpr int KEYS_HIDDEN = 64;
// A mask that adds more than this shows a key. Weights that are relative to it are 0 from VANISHING below it on.
constexpr float SHOWS = -1000.0f, VANISHING = 200.0f;

// The keys from the first to the last one of a block that are shown to some row, and the most that the mask adds to one
// that is not.
struct Shown {
  int64_t from, to;
  float hidden = -inf<float>;
};

// The greatest of n numbers; NaN if one is, the first if that is beyond a limit.
template <class Added>
PV_FN float greatest_of(const Added* mask, int64_t n, float limit) {
  if (!(load(mask) <= limit)) return load(mask);
  Acc<Max, Vec<float, COLUMN>> most;
  steps<COLUMN>(0, n, [&](auto l, int64_t j) PV_INLINE { most.add(load(mask + j, l), l); });
  return total<Max>(most.value());
}

// The keys of n for which the masks of some rows, `row` apart, are beyond a limit, or NaN.
template <class Added>
PV_SHARED Shown shown_keys(const Added* mask, int64_t row, int64_t rows, int64_t n, float limit) {
  const int64_t parts = (n + KEYS_HIDDEN - 1) / KEYS_HIDDEN;
  float most = -inf<float>;
  const auto hidden = [&](int64_t i, int64_t part) PV_INLINE {
    const int64_t from = part * KEYS_HIDDEN;
    const float top = greatest_of(mask + i * row + from, least(KEYS_HIDDEN, n - from), limit);
    if (top <= limit) most = maximum(most, top);
    return top <= limit;
  };
  int64_t from = parts, to = 0;
  for (int64_t i = 0; i < rows; i++) {
    int64_t first = 0, last = parts;
    while (first < from && hidden(i, first)) first++;
    while (last > to && hidden(i, last - 1)) last--;
    from = first, to = last;
  }
  return {from * KEYS_HIDDEN, least(to * KEYS_HIDDEN, n), most};
}

// The keys of n that rows see. below: gives the number below which a mask hides keys, where it may hide some.
template <class Added, class Below>
PV_FN Shown seen_keys(const Matrix<Added>& mask, int64_t rows, int64_t n, Below below) {
  const Shown shown = shown_keys(mask.at, mask.row, rows, n, SHOWS);
  if (shown.from == 0 && shown.to == n) return shown;
  const float limit = below();
  return shown.hidden <= limit ? shown : shown_keys(mask.at, mask.row, rows, n, limit);
}

// Whether the mask shows one of n keys to each row.
template <class Added>
PV_SHARED bool each_sees(const Added* mask, int64_t row, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    while (j < n && greatest_of(mask + i * row + j, least(KEYS_HIDDEN, n - j), SHOWS) <= SHOWS) j += KEYS_HIDDEN;
    if (j >= n) return false;
  }
  return true;
}

// The root of the sum of the squares of some elements; infinite or NaN if one is.
template <class E>
PV_SHARED float norm(const Matrix<E>& a, int64_t rows, int64_t columns) {
  constexpr int W = 4 * COLUMN;
  Acc<Sum, Vec<float, W>> sum;
  for (int64_t i = 0; i < rows; i++)
    steps<W>(0, columns, [&](auto l, int64_t j) PV_INLINE {
      const E* at = a(i, j);
      const auto x = a.column == 1 ? load(at, l) : gather<W>(at, l, [&](int k) PV_INLINE { return k * a.column; });
      sum.add(mul(x, x), l);
    });
  return libm::sqrt(total<Sum>(sum.value()));
}

// Below which number a mask hides a key from rows; NaN if below none. score: what scores are at most. value: what must
// be finite. replaces: the mask stands in place of scores. sees: whether each row sees a key.
PV_FN float hides_below(float score, float value, bool replaces, bool sees) {
  const bool bounded = score < 1e37f;
  if (!(value < inf<float>) || !(bounded || replaces)) return nan<float>;
  return bounded && sees ? SHOWS - VANISHING - 2 * score : -inf<float>;
}

}  // namespace pv
