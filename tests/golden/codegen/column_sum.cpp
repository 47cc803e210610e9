// codegen.vectorize yes column_sum: 64 lanes along i0, cheaper than along i1
// codegen.parallel yes column_sum: an iteration takes about 2.11e+05 ns, so 1 of 2 are worth a thread
// codegen.pairwise yes column_sum, s: each accumulator adds 4096 terms: they are added in blocks, and blocks pairwise, for accuracy
// codegen.abreast yes column_sum, s: rows are read 512 columns at a time: all its 16781312 bytes exceed the L2 caches
extern "C" int64_t k_sum_cc0e278cb00c(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:3
  for (int64_t t = begin; t < end; t++) {                                                             // s, a, st  model.py:2, model.py:1, model.py:3
    const int64_t lo = t * 512;
    const int64_t hi = pv::least(lo + 512, 1024);
    pv::Blocks<pv::Vec<float, 64>, 10> b1[8];                                                         // s  model.py:2
    for (int64_t from = 0; from < 4096; from += 8) {                                                  // s, a  model.py:2, model.py:1
      const int64_t to = pv::least(from + 8, 4096);                                                   // s, a  model.py:2, model.py:1
      pv::whole_steps<64>(lo, hi, [&](auto n, int64_t i0) PV_INLINE {                                 // s, a  model.py:2, model.py:1
        pv::Acc<pv::Sum, pv::Vec<float, 64>> a1;                                                      // s  model.py:2
        for (int64_t i1 = from; i1 < to; i1++) {                                                      // a, s  model.py:1, model.py:2
          const auto v0 = pv::load<float>(p0 + i0 + 1024 * i1, n);                                    // a  model.py:1
          a1.add(v0);                                                                                 // s  model.py:2
        }
        b1[(i0 - lo) / 64].close(a1);                                                                 // s  model.py:2
      });
    }
    pv::whole_steps<64>(lo, hi, [&](auto n, int64_t i0) PV_INLINE {                                   // s, st  model.py:2, model.py:3
      const auto v1 = b1[(i0 - lo) / 64].value();                                                     // s  model.py:2
      pv::store<float>(p1 + i0, v1, n);                                                               // st  model.py:3
    });
  }
  return 0;
}
