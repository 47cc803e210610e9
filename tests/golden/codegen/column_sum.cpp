// codegen.vectorize yes column_sum: 64 lanes along i0, cheaper than along i1
// codegen.parallel yes column_sum: an iteration takes about 2.63e+04 ns, so 1 of 16 are worth a thread
// codegen.pairwise yes column_sum, s: each accumulator adds 4096 terms: they are added in blocks, and blocks pairwise, for accuracy
extern "C" int64_t k_sum_fb831f32f67f(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:3
  for (int64_t t = begin; t < end; t++) {                                                             // s, a, st  model.py:2, model.py:1, model.py:3
    const int64_t lo = t * 64;
    const int64_t hi = pv::least(lo + 64, 1024);
    pv::whole_steps<64>(lo, hi, [&](auto n, int64_t i0) PV_INLINE {                                   // s, a, st  model.py:2, model.py:1, model.py:3
      pv::Acc<pv::Sum, pv::Vec<float, 64>> a1;                                                        // s  model.py:2
      pv::Blocks<pv::Vec<float, 64>> b1;                                                              // s  model.py:2
      for (int64_t from = 0; from < 4096; from += 16) {                                               // a, s  model.py:1, model.py:2
        const int64_t to = pv::least(from + 16, 4096);                                                // a, s  model.py:1, model.py:2
        for (int64_t i1 = from; i1 < to; i1++) {                                                      // a, s  model.py:1, model.py:2
          const auto v0 = pv::load<float>(p0 + i0 + 1024 * i1, n);                                    // a  model.py:1
          a1.add(v0);                                                                                 // s  model.py:2
        }
        b1.close(a1);                                                                                 // s  model.py:2
      }
      const auto v1 = b1.value();                                                                     // s  model.py:2
      pv::store<float>(p1 + i0, v1, n);                                                               // st  model.py:3
    });
  }
  return 0;
}
