// codegen.vectorize yes transposed_store: 16 lanes along i1, cheaper than along i0
// codegen.tile yes transposed_store, o: it is contiguous along i0: squares are written along that axis and transposed in registers
// codegen.parallel yes transposed_store: an iteration takes about 809 ns, so 4 of 13 are worth a thread
extern "C" int64_t k_neg_77bfef6ec48e(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:3
  float* p2 = static_cast<float*>(p[2]);                                                              // st2  model.py:4
  for (int64_t t = begin; t < end; t++) {                                                             // st, a, b, st2  model.py:3, model.py:1, model.py:2, model.py:4
    const int64_t from = t * 16;
    const int64_t to = pv::least(from + 16, 200);
    pv::steps<16>(0, 300, [&](auto n, int64_t i1) PV_INLINE {                                         // st, a, b, st2  model.py:3, model.py:1, model.py:2, model.py:4
      pv::Tile<float, 16> y2;                                                                         // st  model.py:3
      for (int64_t i0 = from; i0 < to; i0++) {                                                        // a, b, st, st2  model.py:1, model.py:2, model.py:3, model.py:4
        const auto v0 = pv::load<float>(p0 + 300 * i0 + i1, n);                                       // a  model.py:1
        const auto v1 = pv::neg(v0);                                                                  // b  model.py:2
        y2.put(i0 - from, v1);                                                                        // st  model.py:3
        pv::store<float>(p2 + 300 * i0 + i1, v0, n);                                                  // st2  model.py:4
      }
      y2.write<false>(p1 + from + 200 * i1, 200, to - from, n);                                       // st  model.py:3
    });
  }
  return 0;
}
