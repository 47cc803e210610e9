// codegen.vectorize yes softmax_transposed: 16 lanes along i0, cheaper than along i1
// codegen.tile yes softmax_transposed, x: it is contiguous along i1: squares are read along that axis and transposed in registers
// codegen.keep yes softmax_transposed, e: computing it again in a later sweep is expensive
// codegen.parallel yes softmax_transposed: an iteration takes about 3.64e+03 ns, so 1 of 3 are worth a thread
// codegen.pairwise yes softmax_transposed, z: each accumulator adds 512 terms: they are added in blocks, and blocks pairwise, for accuracy
extern "C" int64_t k_max_sub_exp_sum_div_e45d68e2058b(void* const* p, const int64_t* s, int64_t begin, int64_t end) {
  const float* p0 = static_cast<const float*>(p[0]);                                                  // a  model.py:1
  float* p1 = static_cast<float*>(p[1]);                                                              // st  model.py:7
  for (int64_t t = begin; t < end; t++) {                                                             // e, m, a, z, and 3 more  model.py:4, model.py:2, model.py:1, model.py:5, and 3 more
    const int64_t lo = t * 16;
    const int64_t hi = pv::least(lo + 16, 48);
    pv::whole_steps<16>(lo, hi, [&](auto n, int64_t i0) PV_INLINE {                                   // e, m, a, z, and 3 more  model.py:4, model.py:2, model.py:1, model.py:5, and 3 more
      alignas(64) float k3[8192];                                                                     // e  model.py:4
      pv::Acc<pv::Max, pv::Vec<float, 16>> a1;                                                        // m  model.py:2
      for (int64_t from = 0; from < 512; from += 16) {                                                // a, m  model.py:1, model.py:2
        const int64_t to = pv::least(from + 16, 512);                                                 // a, m  model.py:1, model.py:2
        const pv::Tile<float, 16> x0(p0, from + 512 * i0, 512, to - from, n, 24576);                  // a  model.py:1
        for (int64_t i1 = from; i1 < to; i1++) {                                                      // a, m  model.py:1, model.py:2
          const auto v0 = x0.row(i1 - from);                                                          // a  model.py:1
          a1.add(v0);                                                                                 // m  model.py:2
        }
      }
      const auto v1 = a1.value();                                                                     // m  model.py:2
      pv::Acc<pv::Sum, pv::Vec<float, 16>> a4;                                                        // z  model.py:5
      pv::Blocks<pv::Vec<float, 16>> b4;                                                              // z  model.py:5
      for (int64_t from = 0; from < 512; from += 16) {                                                // a, b, e, z  model.py:1, model.py:3, model.py:4, model.py:5
        const int64_t to = pv::least(from + 16, 512);                                                 // a, b, e, z  model.py:1, model.py:3, model.py:4, model.py:5
        const pv::Tile<float, 16> x0(p0, from + 512 * i0, 512, to - from, n, 24576);                  // a  model.py:1
        for (int64_t i1 = from; i1 < to; i1++) {                                                      // a, b, e, z  model.py:1, model.py:3, model.py:4, model.py:5
          const auto v0 = x0.row(i1 - from);                                                          // a  model.py:1
          const auto v2 = pv::sub(v0, v1);                                                            // b  model.py:3
          const auto v3 = pv::exp(v2);                                                                // e  model.py:4
          pv::store<float>(k3 + 16 * i1, v3, pv::All<16>());                                          // e  model.py:4
          a4.add(v3);                                                                                 // z  model.py:5
        }
        b4.close(a4);                                                                                 // z  model.py:5
      }
      const auto v4 = b4.value();                                                                     // z  model.py:5
      for (int64_t i1 = 0; i1 < 512; i1++) {                                                          // e, q, st  model.py:4, model.py:6, model.py:7
        const auto v3 = pv::load<float>(k3 + 16 * i1, pv::All<16>());                                 // e  model.py:4
        const auto v5 = pv::div(v3, v4);                                                              // q  model.py:6
        pv::store<float>(p1 + i0 + 48 * i1, v5, n);                                                   // st  model.py:7
      }
    });
  }
  return 0;
}
