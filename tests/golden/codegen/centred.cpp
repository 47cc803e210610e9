// codegen.vectorize yes centred: 16 lanes along i1, cheaper than along i0
// codegen.lanes no centred, x: neighbours along i1 are 1280 elements apart in 8*i0 + 1280*i1
// codegen.keep yes centred, a: computing it again in a later sweep is expensive
// codegen.parallel yes centred: an iteration takes about 122 ns, so 26 of 160 are worth a thread
extern "C" int64_t k_sum_div_sub_966b910af908(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:6
  const auto v2 = float(144.0);                                                                       // n  model.py:3
  for (int64_t t = begin; t < end; t++) {                                                             // a, s, m, d, and 1 more  model.py:1, model.py:2, model.py:4, model.py:5, and 1 more
    const int64_t i0 = t;
    alignas(64) float k0[144];                                                                        // a  model.py:1
    pv::Acc<pv::Sum, pv::Vec<float, 16>> a1;                                                          // s  model.py:2
    pv::whole_steps<16>(0, 144, [&](auto n, int64_t i1) PV_INLINE {                                   // a, s  model.py:1, model.py:2
      const auto v0 = pv::gather<16>(p0, n, [&](int k) PV_INLINE { return 8 * i0 + 1280 * (i1 + k); });  // a  model.py:1
      pv::store<float>(k0 + i1, v0, n);                                                               // a  model.py:1
      a1.add(v0, n);                                                                                  // s  model.py:2
    });
    const auto v1 = pv::total<pv::Sum>(a1.value());                                                   // s  model.py:2
    const auto v3 = pv::div(v1, v2);                                                                  // m  model.py:4
    pv::whole_steps<16>(0, 144, [&](auto n, int64_t i1) PV_INLINE {                                   // a, d, st  model.py:1, model.py:5, model.py:6
      const auto v0 = pv::load<float>(k0 + i1, n);                                                    // a  model.py:1
      const auto v4 = pv::sub(v0, pv::splat<16>(v3));                                                 // d  model.py:5
      pv::store<float>(p1 + 144 * i0 + i1, v4, n);                                                    // st  model.py:6
    });
  }
  return 0;
}
