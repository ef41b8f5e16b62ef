// Loops whose numbers the compiler knows, for instructions that name registers.
#pragma once

#include <type_traits>
#include <utility>

#include "simd.h"

namespace foredraft {

template <int kCount, class Work, int... kIndex>
inline void each(const Work& work, std::integer_sequence<int, kIndex...>) {
  (work(std::integral_constant<int, kIndex>{}), ...);
}

// Calls work(0) to work(kCount - 1) with numbers that the compiler knows.
template <int kCount, class Work>
INLINE inline void each(const Work& work) {
  each<kCount>(work, std::make_integer_sequence<int, kCount>{});
}

}  // namespace foredraft
