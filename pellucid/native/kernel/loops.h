// Checks of indices, and the steps of a loop.
namespace pv {

// ------------------------------------------------------------------------------------------------ index checks

// Why a kernel failed: which of its checks, and the index that is out of range for a dimension of `size`.
struct IndexFailure {
  int64_t check, index, size;
};

// The status that a kernel returns for it: an address that is valid until the next failure in this thread.
[[gnu::cold, gnu::noinline]] inline int64_t index_failure(int64_t check, int64_t index, int64_t size) {
  static thread_local IndexFailure failure;
  failure = {check, index, size};
  return reinterpret_cast<int64_t>(&failure);
}

// The index `a` in a dimension of `size`, or 0 and a failed `status` if it is out of range. wrap: negative indices
// count from the end.
PV_FN int64_t check_index(int64_t a, int64_t size, bool wrap, int64_t& status, int64_t check) {
  const int64_t index = wrap && a < 0 ? a + size : a;
  if (index >= 0 && index < size) return index;
  if (status == 0) status = index_failure(check, a, size);
  return 0;
}
template <int W, class N>
PV_FN Vec<int64_t, W> check_index(const Vec<int64_t, W>& a, int64_t size, bool wrap, int64_t& status, int64_t check,
                                  const N& n) {
  const int64_t added = wrap ? size : 0;
  const auto index = map<int64_t>([&](auto x) PV_INLINE { return x + (x < 0 ? added : 0); }, a);
  const auto outside = both(compare<LE>(splat<W>(uint64_t(size)), as<uint64_t>(index)), n);
  if (__builtin_expect(any(outside), 0)) {
    const auto lane = lanes(a);
    for (int k = 0; k < active(n); k++) check_index(lane[k], size, wrap, status, check);
  }
  return where(both(compare<LT>(as<uint64_t>(index), splat<W>(uint64_t(size))), n), index, splat<W>(int64_t(0)));
}

// ------------------------------------------------------------------------------------------------ loops

PV_FN int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// body(n, i) for i = lo, lo + W, ...: whole steps with n = All<W>, then the remainder with n = Some<W>.
template <int W, class F> PV_FN void steps(int64_t lo, int64_t hi, F body) {
  int64_t i = lo;
  for (; i + W <= hi; i += W) body(All<W>(), i);
  if (i < hi) body(Some<W>(hi - i), i);
}
// `steps` if W divides the number of iterations.
template <int W, class F> PV_FN void whole_steps(int64_t lo, int64_t hi, F body) {
  for (int64_t i = lo; i < hi; i += W) body(All<W>(), i);
}

}  // namespace pv
