// Products in which each row, or term, chooses one of several matrices. Adjacent ones with equal choices are computed
// together.
namespace pv {

// The index of the matrix that row, or term, i chooses.
struct Choices {
  const int64_t* at;
  int64_t step;
  PV_FN int64_t operator()(int64_t i) const { return at[i * step]; }
  // The first one after i, up to `end`, with another choice.
  PV_FN int64_t next(int64_t i, int64_t end) const {
    const int64_t chosen = (*this)(i);
    while (++i < end && (*this)(i) == chosen) {}
    return i;
  }
};

// Pack each matrix of a stack as panels that begin at a cache line.
constexpr int64_t packed_stride(int64_t size) { return (size + LINE / 4 - 1) / (LINE / 4) * (LINE / 4); }
template <int64_t N, int64_t K, int64_t SIZE, class F, class E>
inline void pack_matrices(int64_t count, int64_t stride, int64_t area, const Matrix<E>& b, float* to) {
  constexpr int64_t size = panels_of(N) * units_of<F>(K) + 1;
  static_assert(SIZE % packed_stride(size) == 0);
  for (int64_t i = 0; i < count; i++)
    pack_panels<N, K, size, F>(area, Matrix<E>{b.at + i * stride, b.row, b.column}, to + i * packed_stride(size));
}
template <class F, class E>
PV_FN Panels stacked_panels_from(const E* panels, int64_t n, int64_t k, int64_t first, int64_t matrix) {
  const int64_t size = panels_of(n) * units_of<F>(k) + 1;
  return panels_from<F>((const float*)panels + matrix * packed_stride(size), n, k, first);
}

// c[m, n] = a[m, k] @ b(choice of the row)[k, n], see `contract`; 0 for rows whose choice is not in [0, count).
template <int M, int N, int WIDTH, class E, class B>
inline void contract_chosen(int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const B& b, const Choices& choices,
                            int64_t count, const Sums& c) {
  for (int64_t from = 0, to; from < m; from = to) {
    const int64_t chosen = choices(from);
    to = choices.next(from, m);
    if (chosen < 0 || chosen >= count) clear(to - from, n, c.from(from, 0));
    else contract<M, N, WIDTH>(to - from, n, k, a.from(from, 0), b(chosen), c.from(from, 0));
  }
}

// c[m, n] = a[m, k] @ b[k, n], summed over those of k terms whose choice is `mine`.
template <int M, int N, int WIDTH, class E>
inline void contract_some(int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const Matrix<E>& b,
                          const Choices& choices, int64_t mine, Sums c) {
  for (int64_t from = 0, to; from < k; from = to) {
    to = choices.next(from, k);
    if (choices(from) != mine) continue;
    contract<M, N, WIDTH>(m, n, to - from, a.from(0, from), b.from(from, 0), c);
    c.more = true;
  }
  if (!c.more) clear(m, n, c);
}

}  // namespace pv
