// Functions marked PV_SHARED are compiled once for a machine, not with each batch of kernels: they take most of the
// compiler's time, and depend on the types of elements but on nothing else of a kernel. The file of an element type,
// which is linked to the kernels that use it, is PV_SHARED_float(template) and so on.
namespace pv {

#define PV_OF_FACTOR(TEMPLATE, F)                                                                          \
  TEMPLATE void tiles<1>(Beside&, int64_t, int64_t, const LeftRows<F>&, const Rows&, const Sums&);         \
  TEMPLATE void tiles<2>(Beside&, int64_t, int64_t, const LeftRows<F>&, const Rows&, const Sums&);         \
  TEMPLATE bool finite<F>(int64_t, int64_t, const float*);                                                 \
  TEMPLATE float weigh<true, F>(float*, int64_t, float, Seen&);                                            \
  TEMPLATE float weigh<false, F>(float*, int64_t, float, Seen&);                                           \
  TEMPLATE void weigh_changes<F>(float*, float*, int64_t, float, float, float, float, float);

#define PV_OF_ELEMENT(TEMPLATE, E)                                                                         \
  TEMPLATE void dot_block(int64_t, int64_t, int64_t, const Matrix<E>&, const Matrix<E>&, const Sums&);     \
  TEMPLATE void pack_columns(const Matrix<E>&, int64_t, int64_t, float*, int64_t, const InOrder&);         \
  TEMPLATE void pack_columns(const Matrix<E>&, int64_t, int64_t, float*, int64_t, const ByTap&);           \
  TEMPLATE void pack_rows(const Matrix<E>&, int64_t, int64_t, float*);                                     \
  TEMPLATE void copy_rows(const Matrix<E>&, int64_t, int64_t, float*, int64_t);                            \
  TEMPLATE void gather_rows(const Window<E>&, int64_t, int64_t, Factor<E>*);                               \
  TEMPLATE void contract_each(int64_t, int64_t, const Window<E>&, const Matrix<E>&, Sums);                 \
  TEMPLATE void contract_each(int64_t, int64_t, const Window<E>&, const Panels&, Sums);                    \
  TEMPLATE void add_mask(float*, int64_t, float, const E*, int64_t, bool);

#define PV_OF_NARROW(TEMPLATE, E)                                                                          \
  PV_OF_ELEMENT(TEMPLATE, E)                                                                               \
  TEMPLATE void tiles<1>(                                                                                  \
      Beside&, int64_t, int64_t, const LeftRows<Factor<E>>&, const LyingRows<E>&, const Sums&);            \
  TEMPLATE void tiles<2>(                                                                                  \
      Beside&, int64_t, int64_t, const LeftRows<Factor<E>>&, const LyingRows<E>&, const Sums&);

#define PV_SHARED_float(TEMPLATE)                                                                          \
  PV_OF_FACTOR(TEMPLATE, float)                                                                            \
  PV_OF_ELEMENT(TEMPLATE, float)                                                                           \
  TEMPLATE void pack_columns(const Placed&, int64_t, int64_t, float*, int64_t, const InOrder&);            \
  TEMPLATE void pack_rows(const PlacedColumns&, int64_t, int64_t, float*);                                 \
  TEMPLATE void spread_pixels<ROWS>(                                                                       \
      int64_t, int64_t, const Terms&, const float*, int64_t, const Panels&, const Sums&);

#ifdef __AVX512BF16__
#define PV_SHARED_bf16(TEMPLATE) PV_OF_FACTOR(TEMPLATE, bf16) PV_OF_NARROW(TEMPLATE, bf16)
#else
#define PV_SHARED_bf16(TEMPLATE) PV_OF_NARROW(TEMPLATE, bf16)
#endif

#define PV_SHARED_f16(TEMPLATE) PV_OF_NARROW(TEMPLATE, f16)

PV_SHARED_float(extern template)
PV_SHARED_bf16(extern template)
PV_SHARED_f16(extern template)

}  // namespace pv
