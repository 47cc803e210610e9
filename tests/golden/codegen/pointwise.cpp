// codegen.vectorize yes pointwise: 16 lanes along i1, cheaper than along i0
// codegen.parallel yes pointwise: an iteration takes about 211 ns, so 15 of 16384 are worth a thread
// codegen.stream yes pointwise, o: the kernel moves more than twice the size of the last cache, so its output is written past the caches
extern "C" int64_t k_add_mul_ac65c0ef315f(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  const float* p1 = static_cast<const float*>(p[1]);                                                  // b  model.py:2
  const float* p2 = static_cast<const float*>(p[2]);                                                  // d  model.py:4
  const float* p3 = static_cast<const float*>(p[3]);                                                  // f  model.py:6
  const float* p4 = static_cast<const float*>(p[4]);                                                  // h  model.py:8
  float* p5 = static_cast<float*>(p[5]);                                                              // st  model.py:10
  for (int64_t t = begin; t < end; t++) {                                                             // a, b, c, d, and 6 more  model.py:1, model.py:2, model.py:3, model.py:4, and 6 more
    const int64_t i0 = t;
    pv::whole_steps<16>(0, 512, [&](auto n, int64_t i1) PV_INLINE {                                   // a, b, c, d, and 6 more  model.py:1, model.py:2, model.py:3, model.py:4, and 6 more
      const auto v0 = pv::load<float>(p0 + 512 * i0 + i1, n);                                         // a  model.py:1
      const auto v1 = pv::load<float>(p1 + i1, n);                                                    // b  model.py:2
      const auto v2 = pv::add(v0, v1);                                                                // c  model.py:3
      const auto v3 = pv::load<float>(p2 + 512 * i0 + i1, n);                                         // d  model.py:4
      const auto v4 = pv::add(v2, v3);                                                                // e  model.py:5
      const auto v5 = pv::load<float>(p3 + i1, n);                                                    // f  model.py:6
      const auto v6 = pv::mul(v4, v5);                                                                // g  model.py:7
      const auto v7 = pv::load<float>(p4 + i1, n);                                                    // h  model.py:8
      const auto v8 = pv::add(v6, v7);                                                                // k  model.py:9
      pv::stream<float>(p5 + 512 * i0 + i1, v8, n);                                                   // st  model.py:10
    });
  }
  pv::stream_end();
  return 0;
}
