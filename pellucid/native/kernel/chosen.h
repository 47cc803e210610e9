// Products in which rows, or terms, choose one of several matrices. Neighbours that choose the same are computed together.
namespace pv {

// What row, or term, i chooses.
struct Choices {
  const int64_t* at;
  int64_t step;
  PV_FN int64_t operator()(int64_t i) const { return at[i * step]; }
  // The first after i, up to `end`, that chooses something else.
  PV_FN int64_t next(int64_t i, int64_t end) const {
    const int64_t chosen = (*this)(i);
    while (++i < end && (*this)(i) == chosen) {}
    return i;
  }
};

// Each of a stack of matrices as panels, from the beginning of a line of the cache on.
constexpr int64_t panels_apart(int64_t size) { return (size + LINE / 4 - 1) / (LINE / 4) * (LINE / 4); }
template <int64_t N, int64_t K, int64_t SIZE, class F, class E>
inline void pack_matrices(int64_t count, int64_t apart, int64_t area, const Matrix<E>& b, float* to) {
  constexpr int64_t size = panels_of(N) * units_of<F>(K) + 1;
  static_assert(SIZE % panels_apart(size) == 0);
  for (int64_t i = 0; i < count; i++)
    pack_panels<N, K, size, F>(area, Matrix<E>{b.at + i * apart, b.row, b.column}, to + i * panels_apart(size));
}
template <class F, class E>
PV_FN Panels stacked_panels_from(const E* panels, int64_t n, int64_t k, int64_t first, int64_t matrix) {
  const int64_t size = panels_of(n) * units_of<F>(k) + 1;
  return panels_from<F>((const float*)panels + matrix * panels_apart(size), n, k, first);
}

// c[m, n] = a[m, k] @ b(choice of the row)[k, n], as `contract` computes it: 0 for rows that choose none of `count`.
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

// c[m, n] = a[m, k] @ b[k, n] over those of k terms that choose `mine`.
template <int M, int N, int WIDTH, class E>
inline void contract_some(int64_t m, int64_t n, int64_t k, const Matrix<E>& a, const Matrix<E>& b, const Choices& choices,
                          int64_t mine, Sums c) {
  for (int64_t from = 0, to; from < k; from = to) {
    to = choices.next(from, k);
    if (choices(from) != mine) continue;
    contract<M, N, WIDTH>(m, n, to - from, a.from(0, from), b.from(from, 0), c);
    c.more = true;
  }
  if (!c.more) clear(m, n, c);
}

}  // namespace pv
