// codegen.vectorize yes argmax: 16 lanes along i1, cheaper than along i0
// codegen.parallel no argmax: the whole kernel takes about 394 ns in 50 iterations: one thread is enough
extern "C" int64_t k_argmax_cfc22e209ae9(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  int64_t* p1 = static_cast<int64_t*>(p[1]);                                                          // st  model.py:3
  for (int64_t t = begin; t < end; t++) {                                                             // m, a, st  model.py:2, model.py:1, model.py:3
    const int64_t i0 = t;
    pv::Arg<pv::Max, float, 16, int32_t> a1;                                                          // m  model.py:2
    pv::steps<16>(0, 100, [&](auto n, int64_t i1) PV_INLINE {                                         // a, m  model.py:1, model.py:2
      const auto v0 = pv::load<float>(p0 + 100 * i0 + i1, n);                                         // a  model.py:1
      a1.add(v0, i1, n);                                                                              // m  model.py:2
    });
    const auto v1 = a1.first();                                                                       // m  model.py:2
    pv::store(p1 + i0, v1);                                                                           // st  model.py:3
  }
  return 0;
}
