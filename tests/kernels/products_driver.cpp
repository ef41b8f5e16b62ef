// Multiplies weights in each format and prints hashes of what comes out: for CPUs that are only emulated.
#include "products.cpp"

#include <cstdio>
#include <cstring>
#include <random>

static void print_hash(int64_t format, int64_t head_bytes) {
  const int64_t chunk_bytes = kFormats[format].chunk_bytes;
  const bool takes_eight = PackedMatrix({nullptr, format, 0}, 0).takes_eight();
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (int64_t K : {45, 64, 96, 576})
    for (int64_t R : {16, 50, 130})
      for (int64_t T : {1, 2, 3, 5, 8, 9, 17}) {
        std::mt19937 random(unsigned(1000 * K + R));
        std::vector<uint8_t> weights(size_t((K + 63) / 64 * chunk_bytes * ((R + 15) / 16)));
        for (uint8_t& byte : weights) byte = uint8_t(random());
        for (size_t chunk = 0; chunk < weights.size(); chunk += size_t(chunk_bytes))
          for (int64_t i = 1; i < head_bytes; i += 2) weights[chunk + size_t(i)] &= 0xbb;  // finite scales
        std::vector<float> x(size_t(T * K)), out(size_t(T * R));
        for (float& value : x) value = float(int(random() % 2001) - 1000) / 77;
        for (int64_t in_eight = 0; in_eight <= takes_eight; ++in_eight) {
          foredraft_multiply(kFormPacked, format, weights.data(), 0, R, K, x.data(), T, in_eight, out.data());
          for (float value : out) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof bits);
            hash = (hash ^ bits) * 1099511628211u;
          }
        }
      }
  std::printf("%016llx\n", static_cast<unsigned long long>(hash));
}

int main() {
  print_hash(kInt8, Int8::kHeadBytes);
  for (int64_t format = kInt8 + 1; format < kCentred4; ++format) print_hash(format, 128);
  print_hash(kCentred4, Centred4::kHeadBytes);
  print_hash(kCentred5, Centred5::kHeadBytes);
}
