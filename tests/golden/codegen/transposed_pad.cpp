// codegen.vectorize yes transposed_pad: 16 lanes along i1, cheaper than along i0
// codegen.tile yes transposed_pad, x: it is contiguous along i0: squares are read along that axis and transposed in registers
// codegen.parallel no transposed_pad: the whole kernel takes about 1.2e+03 ns in 5 iterations: one thread is enough
extern "C" int64_t k_lt_e7deb422b58c(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:4
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:5
  const auto v1 = int64_t(100);                                                                       // n  model.py:2
  for (int64_t t = begin; t < end; t++) {                                                             // p, inside, a, st  model.py:1, model.py:3, model.py:4, model.py:5
    const int64_t from = t * 16;
    const int64_t to = pv::least(from + 16, 80);
    pv::steps<16>(0, 104, [&](auto n, int64_t i1) PV_INLINE {                                         // p, inside, a, st  model.py:1, model.py:3, model.py:4, model.py:5
      const auto v0 = pv::iota<16>(i1, 1);                                                            // p  model.py:1
      const auto v2 = pv::below<16>(i1, v1);                                                          // inside  model.py:3
      const pv::Tile<float, 16> x3(p0, from + 80 * i1, 80, to - from, n, 8000);                       // a  model.py:4
      for (int64_t i0 = from; i0 < to; i0++) {                                                        // a, st  model.py:4, model.py:5
        const auto v3 = pv::where(v2, x3.row(i0 - from), pv::splat<16>(float(0.0)));                  // a  model.py:4
        pv::store<float>(p1 + 104 * i0 + i1, v3, n);                                                  // st  model.py:5
      }
    });
  }
  return 0;
}
