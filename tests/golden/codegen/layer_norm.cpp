// codegen.vectorize yes layer_norm: 64 lanes along i1, cheaper than along i0
// codegen.parallel yes layer_norm: an iteration takes about 110 ns, so 29 of 100 are worth a thread
extern "C" int64_t k_sum_div_sub_mul_add_rsqrt_4cd1022d8168(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const pv::bf16* p0 = static_cast<const pv::bf16*>(p[0]);                                            // a  model.py:1
  const pv::bf16* p1 = static_cast<const pv::bf16*>(p[1]);                                            // g  model.py:13
  pv::bf16* p2 = static_cast<pv::bf16*>(p[2]);                                                        // st  model.py:15
  const auto v2 = float(768.0);                                                                       // n  model.py:3
  const auto v8 = float(1e-05);                                                                       // eps  model.py:9
  for (int64_t t = begin; t < end; t++) {                                                             // s, a, mean, v, and 9 more  model.py:2, model.py:1, model.py:4, model.py:7, and 9 more
    const int64_t i0 = t;
    pv::Acc<pv::Sum, pv::Vec<float, 64>> a1;                                                          // s  model.py:2
    pv::whole_steps<64>(0, 768, [&](auto n, int64_t i1) PV_INLINE {                                   // a, s  model.py:1, model.py:2
      const auto v0 = pv::load<pv::bf16>(p0 + 768 * i0 + i1, n);                                      // a  model.py:1
      a1.add(v0, n);                                                                                  // s  model.py:2
    });
    const auto v1 = pv::total<pv::Sum>(a1.value());                                                   // s  model.py:2
    const auto v3 = pv::div(v1, v2);                                                                  // mean  model.py:4
    pv::Acc<pv::Sum, pv::Vec<float, 64>> a6;                                                          // v  model.py:7
    pv::whole_steps<64>(0, 768, [&](auto n, int64_t i1) PV_INLINE {                                   // a, c, c2, v  model.py:1, model.py:5, model.py:6, model.py:7
      const auto v0 = pv::load<pv::bf16>(p0 + 768 * i0 + i1, n);                                      // a  model.py:1
      const auto v4 = pv::sub(v0, pv::splat<64>(v3));                                                 // c  model.py:5
      const auto v5 = pv::mul(v4, v4);                                                                // c2  model.py:6
      a6.add(v5, n);                                                                                  // v  model.py:7
    });
    const auto v6 = pv::total<pv::Sum>(a6.value());                                                   // v  model.py:7
    const auto v7 = pv::div(v6, v2);                                                                  // var  model.py:8
    const auto v9 = pv::add(v7, v8);                                                                  // ve  model.py:10
    const auto v10 = pv::rsqrt(v9);                                                                   // r  model.py:11
    pv::whole_steps<64>(0, 768, [&](auto n, int64_t i1) PV_INLINE {                                   // a, c, t, g, and 2 more  model.py:1, model.py:5, model.py:12, model.py:13, and 2 more
      const auto v0 = pv::load<pv::bf16>(p0 + 768 * i0 + i1, n);                                      // a  model.py:1
      const auto v4 = pv::sub(v0, pv::splat<64>(v3));                                                 // c  model.py:5
      const auto v11 = pv::mul(v4, pv::splat<64>(v10));                                               // t  model.py:12
      const auto v12 = pv::load<pv::bf16>(p1 + i1, n);                                                // g  model.py:13
      const auto v13 = pv::mul(v11, v12);                                                             // u  model.py:14
      pv::store<pv::bf16>(p2 + 768 * i0 + i1, v13, n);                                                // st  model.py:15
    });
  }
  return 0;
}
