// SPDX-License-Identifier: Apache-2.0
//
// Runs a fuzz target without libFuzzer: over every file of its corpus and over
// mutations of them that follow from a fixed number, so that ctest replays the
// same inputs every time.
//
//   replay CORPUS_DIRECTORY [MUTATIONS_PER_SEED]

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/target.h"

namespace {

using Random = std::mt19937_64;

size_t Below(Random& random, size_t end) { return end == 0 ? 0 : random() % end; }

// Numbers at which parsers tend to break.
uint64_t Interesting(Random& random) {
  constexpr uint64_t kNumbers[] = {0,
                                   1,
                                   0x7f,
                                   0xff,
                                   0xffff,
                                   0x7fffffff,
                                   0x80000000,
                                   0xffffffff,
                                   0x100000000,
                                   ~uint64_t{0},
                                   ~uint64_t{0} >> 1,
                                   uint64_t{1} << 63};
  return kNumbers[Below(random, std::size(kNumbers))];
}

void MutateOnce(std::string& text, Random& random) {
  if (text.empty()) return;
  const size_t at = Below(random, text.size());
  const size_t length = std::min(text.size() - at, 1 + Below(random, 16));
  switch (Below(random, 6)) {
    case 0: text[at] = static_cast<char>(text[at] ^ (1 << Below(random, 8))); return;
    case 1: text[at] = static_cast<char>(random()); return;
    case 2: {
      const uint64_t number = Interesting(random);
      const size_t width = std::min<size_t>(length, 8);
      for (size_t i = 0; i < width; ++i) text[at + i] = static_cast<char>(number >> (8 * i));
      return;
    }
    case 3: text.erase(at, length); return;
    case 4: text.insert(Below(random, text.size()), text.substr(at, length)); return;
    default: text.resize(at);
  }
}

void Run(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

std::vector<std::string> Corpus(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> seeds;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const size_t mutations = argc > 2 ? std::stoul(argv[2]) : 3000;
  const std::vector<std::string> seeds = Corpus(argv[1]);
  if (seeds.empty()) {
    std::fprintf(stderr, "no seeds in %s\n", argv[1]);
    return 1;
  }
  Random random(20261121);
  for (const std::string& seed : seeds) {
    Run(seed);
    for (size_t i = 0; i < mutations; ++i) {
      std::string text = seed;
      for (size_t n = 1 + Below(random, 4); n > 0; --n) MutateOnce(text, random);
      Run(text);
    }
  }
  std::printf("%zu seeds, %zu inputs\n", seeds.size(), seeds.size() * (mutations + 1));
  return 0;
}
