// Functions marked PV_SHARED are compiled once per machine, not with each batch of kernels: they take most of the
// compilation time, and of a kernel only the element types matter to them. They are grouped in parts, with a macro for
// each element type: the object file of PV_SHARED_dots_float(template) is linked to the kernels that use it.
namespace pv {

#define PV_TILES(TEMPLATE, F, C, Right)                                                                    \
  TEMPLATE void tiles<C>(BlockState&, int64_t, int64_t, const LeftRows<F>&, const Right&, const Sums&);
#define PV_PACKING(TEMPLATE, E)                                                                            \
  TEMPLATE void pack_columns(const Matrix<E>&, int64_t, int64_t, float*, int64_t, const InOrder&);         \
  TEMPLATE void pack_rows(const Matrix<E>&, int64_t, int64_t, float*);                                     \
  TEMPLATE void copy_rows(const Matrix<E>&, int64_t, int64_t, float*, int64_t);
#define PV_DOTS(TEMPLATE, E, B)                                                                            \
  TEMPLATE void dot_block(int64_t, int64_t, int64_t, const Matrix<E>&, const Matrix<B>&, const Sums&);
#define PV_CASTS(TEMPLATE, E, B)                                                                           \
  PV_DOTS(TEMPLATE, E, B)                                                                                  \
  PV_TILES(TEMPLATE, Factor<E>, 2, NarrowRows<B>) PV_TILES(TEMPLATE, Factor<E>, 1, NarrowRows<B>)          \
  TEMPLATE void pack_columns(const Matrix<B>&, int64_t, int64_t, float*, int64_t, const InOrder&);
#define PV_WINDOWS(TEMPLATE, E)                                                                            \
  TEMPLATE void pack_columns(const Matrix<E>&, int64_t, int64_t, float*, int64_t, const ByTap&);           \
  TEMPLATE void gather_rows(const Window<E>&, int64_t, int64_t, Factor<E>*);                               \
  TEMPLATE void contract_each(int64_t, int64_t, const Window<E>&, const Matrix<E>&, Sums);                 \
  TEMPLATE void contract_each(int64_t, int64_t, const Window<E>&, const Panels&, Sums);
#define PV_FINITE(TEMPLATE, F) TEMPLATE bool finite<F>(int64_t, int64_t, const float*);
#define PV_WEIGHTS(TEMPLATE, F)                                                                            \
  TEMPLATE float softmax_block<true, F>(float*, int64_t, float, SoftmaxState&);                            \
  TEMPLATE float softmax_block<false, F>(float*, int64_t, float, SoftmaxState&);                           \
  TEMPLATE void weights_and_grads<F>(float*, float*, int64_t, float, float, float, float, float);
#define PV_MASKS(TEMPLATE, E)                                                                              \
  TEMPLATE void cap_scores<E>(float*, int64_t, float, float);                                              \
  TEMPLATE VisibleKeys keys_above(const E*, int64_t, int64_t, int64_t, float);                             \
  TEMPLATE bool every_row_has_visible(const E*, int64_t, int64_t, int64_t);                                \
  TEMPLATE float norm(const Matrix<E>&, int64_t, int64_t);                                                 \
  TEMPLATE void add_mask(float*, int64_t, float, const E*, int64_t, Masking);

// Instances for bf16 where pairs of it are multiplied; elsewhere bf16 is converted to float.
#ifdef __AVX512BF16__
#define PV_PAIRS(PART, TEMPLATE, ...) PART(TEMPLATE, bf16, ##__VA_ARGS__)
#else
#define PV_PAIRS(PART, TEMPLATE, ...)
#endif

// Convolutions by AMX tiles.
#ifdef PV_AMX
#define PV_COPIED(TEMPLATE)                                                                                \
  TEMPLATE bool contract_copied(int64_t, int64_t, const Window<bf16>&, const Matrix<bf16>&, const Sums&);  \
  TEMPLATE bool contract_copied(int64_t, int64_t, const Window<bf16>&, const Panels&, const Sums&);
#else
#define PV_COPIED(TEMPLATE)
#endif

#define PV_SHARED_products_float(TEMPLATE) PV_TILES(TEMPLATE, float, 2, Rows) PV_PACKING(TEMPLATE, float)
#define PV_SHARED_products_bf16(TEMPLATE)                                                                  \
  PV_PAIRS(PV_TILES, TEMPLATE, 2, Rows)                                                                    \
  PV_TILES(TEMPLATE, Factor<bf16>, 2, UnpackedRows<bf16>) PV_PACKING(TEMPLATE, bf16)
#define PV_SHARED_products_f16(TEMPLATE) PV_TILES(TEMPLATE, float, 2, UnpackedRows<f16>) PV_PACKING(TEMPLATE, f16)

// Panels with only one register of columns.
#define PV_SHARED_halves_float(TEMPLATE) PV_TILES(TEMPLATE, float, 1, Rows)
#define PV_SHARED_halves_bf16(TEMPLATE)                                                                    \
  PV_PAIRS(PV_TILES, TEMPLATE, 1, Rows) PV_TILES(TEMPLATE, Factor<bf16>, 1, UnpackedRows<bf16>)
#define PV_SHARED_halves_f16(TEMPLATE) PV_TILES(TEMPLATE, float, 1, UnpackedRows<f16>)

#define PV_SHARED_dots_float(TEMPLATE) PV_DOTS(TEMPLATE, float, float)
#define PV_SHARED_dots_bf16(TEMPLATE) PV_DOTS(TEMPLATE, bf16, bf16)
#define PV_SHARED_dots_f16(TEMPLATE) PV_DOTS(TEMPLATE, f16, f16)

// Right operands that are cast when they are read.
template <class E> using CastSigned = Cast<int8_t, E>;
template <class E> using CastUnsigned = Cast<uint8_t, E>;
#define PV_SHARED_casts_float(TEMPLATE)                                                                    \
  PV_CASTS(TEMPLATE, float, CastSigned<float>) PV_CASTS(TEMPLATE, float, CastUnsigned<float>)
#define PV_SHARED_casts_bf16(TEMPLATE)                                                                     \
  PV_CASTS(TEMPLATE, bf16, CastSigned<bf16>) PV_CASTS(TEMPLATE, bf16, CastUnsigned<bf16>)
#define PV_SHARED_casts_f16(TEMPLATE)                                                                      \
  PV_CASTS(TEMPLATE, f16, CastSigned<f16>) PV_CASTS(TEMPLATE, f16, CastUnsigned<f16>)

#define PV_SHARED_windows_float(TEMPLATE)                                                                  \
  PV_WINDOWS(TEMPLATE, float) PV_FINITE(TEMPLATE, float)                                                   \
  TEMPLATE void pack_columns(const OffsetRows&, int64_t, int64_t, float*, int64_t, const InOrder&);        \
  TEMPLATE void pack_rows(const OffsetColumns&, int64_t, int64_t, float*);
#define PV_SHARED_windows_bf16(TEMPLATE)                                                                   \
  PV_WINDOWS(TEMPLATE, bf16) PV_PAIRS(PV_FINITE, TEMPLATE) PV_COPIED(TEMPLATE)
#define PV_SHARED_windows_f16(TEMPLATE) PV_WINDOWS(TEMPLATE, f16)

#define PV_SHARED_taps_float(TEMPLATE)                                                                     \
  PV_TILES(TEMPLATE, float, 2, RowsOfLines) PV_TILES(TEMPLATE, float, 1, RowsOfLines)

#define PV_SHARED_attention_float(TEMPLATE) PV_WEIGHTS(TEMPLATE, float) PV_MASKS(TEMPLATE, float)
#define PV_SHARED_attention_bf16(TEMPLATE) PV_PAIRS(PV_WEIGHTS, TEMPLATE) PV_MASKS(TEMPLATE, bf16)
#define PV_SHARED_attention_f16(TEMPLATE) PV_MASKS(TEMPLATE, f16)

#define PV_SHARED_spread_float(TEMPLATE)                                                                   \
  TEMPLATE void spread_pixels<ROWS>(                                                                       \
      int64_t, int64_t, const Terms&, const float*, int64_t, const Panels&, const Sums&);

#define PV_SHARED_all(TEMPLATE)                                                                            \
  PV_SHARED_products_float(TEMPLATE) PV_SHARED_products_bf16(TEMPLATE) PV_SHARED_products_f16(TEMPLATE)    \
  PV_SHARED_halves_float(TEMPLATE) PV_SHARED_halves_bf16(TEMPLATE) PV_SHARED_halves_f16(TEMPLATE)          \
  PV_SHARED_dots_float(TEMPLATE) PV_SHARED_dots_bf16(TEMPLATE) PV_SHARED_dots_f16(TEMPLATE)                \
  PV_SHARED_casts_float(TEMPLATE) PV_SHARED_casts_bf16(TEMPLATE) PV_SHARED_casts_f16(TEMPLATE)             \
  PV_SHARED_windows_float(TEMPLATE) PV_SHARED_windows_bf16(TEMPLATE) PV_SHARED_windows_f16(TEMPLATE)       \
  PV_SHARED_taps_float(TEMPLATE)                                                                           \
  PV_SHARED_attention_float(TEMPLATE) PV_SHARED_attention_bf16(TEMPLATE) PV_SHARED_attention_f16(TEMPLATE) \
  PV_SHARED_spread_float(TEMPLATE)

PV_SHARED_all(extern template)

}  // namespace pv
