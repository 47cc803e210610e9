// codegen.vectorize yes embedding: 16 lanes along i1, cheaper than along i0
// codegen.parallel no embedding: the whole kernel takes about 5.04e+03 ns in 100 iterations: one thread is enough
extern "C" int64_t k_copy_8cd974b8e34f(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const int64_t* p0 = static_cast<const int64_t*>(p[0]);                                              // k  model.py:1
  const float* p1 = static_cast<const float*>(p[1]);                                                  // a  model.py:3
  float* p2 = static_cast<float*>(p[2]);                                                              // st  model.py:4
  int64_t status = 0;
  for (int64_t t = begin; t < end; t++) {                                                             // k, c, a, st  model.py:1, model.py:2, model.py:3, model.py:4
    const int64_t i0 = t;
    const auto v0 = pv::load(p0 + i0);                                                                // k  model.py:1
    const auto v1 = pv::check_index(v0, 30, true, status, 0);                                         // c  model.py:2
    pv::whole_steps<16>(0, 768, [&](auto n, int64_t i1) PV_INLINE {                                   // a, st  model.py:3, model.py:4
      const auto v2 = pv::load<float>(p1 + i1 + 768 * v1, n);                                         // a  model.py:3
      pv::store<float>(p2 + 768 * i0 + i1, v2, n);                                                    // st  model.py:4
    });
  }
  return status;
}
