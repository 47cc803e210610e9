// codegen.vectorize yes softmax: 64 lanes along i1, cheaper than along i0
// codegen.keep yes softmax, e: computing it again in a later sweep is expensive
// codegen.parallel yes softmax: an iteration takes about 179 ns, so 18 of 48 are worth a thread
extern "C" int64_t k_max_sub_exp_sum_div_9d136156875c(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:7
  for (int64_t t = begin; t < end; t++) {                                                             // e, m, a, z, and 3 more  model.py:4, model.py:2, model.py:1, model.py:5, and 3 more
    const int64_t i0 = t;
    alignas(64) float k3[512];                                                                        // e  model.py:4
    pv::Acc<pv::Max, pv::Vec<float, 64>> a1;                                                          // m  model.py:2
    pv::whole_steps<64>(0, 512, [&](auto n, int64_t i1) PV_INLINE {                                   // a, m  model.py:1, model.py:2
      const auto v0 = pv::load<float>(p0 + 512 * i0 + i1, n);                                         // a  model.py:1
      a1.add(v0, n);                                                                                  // m  model.py:2
    });
    const auto v1 = pv::total<pv::Max>(a1.value());                                                   // m  model.py:2
    pv::Acc<pv::Sum, pv::Vec<float, 64>> a4;                                                          // z  model.py:5
    pv::whole_steps<64>(0, 512, [&](auto n, int64_t i1) PV_INLINE {                                   // a, b, e, z  model.py:1, model.py:3, model.py:4, model.py:5
      const auto v0 = pv::load<float>(p0 + 512 * i0 + i1, n);                                         // a  model.py:1
      const auto v2 = pv::sub(v0, pv::splat<64>(v1));                                                 // b  model.py:3
      const auto v3 = pv::exp(v2);                                                                    // e  model.py:4
      pv::store<float>(k3 + i1, v3, n);                                                               // e  model.py:4
      a4.add(v3, n);                                                                                  // z  model.py:5
    });
    const auto v4 = pv::total<pv::Sum>(a4.value());                                                   // z  model.py:5
    pv::whole_steps<64>(0, 512, [&](auto n, int64_t i1) PV_INLINE {                                   // e, q, st  model.py:4, model.py:6, model.py:7
      const auto v3 = pv::load<float>(k3 + i1, n);                                                    // e  model.py:4
      const auto v5 = pv::div(v3, pv::splat<64>(v4));                                                 // q  model.py:6
      pv::store<float>(p1 + 512 * i0 + i1, v5, n);                                                    // st  model.py:7
    });
  }
  return 0;
}
