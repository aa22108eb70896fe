// SPDX-License-Identifier: Apache-2.0
//
// dialect_bench: what it costs to show a step of DeepSeek-V3's sizes (58 layers of 256 experts,
// 44,544 matrices) under other names.  Each tensor lies in as many shards as the line says, of
// files of their own.  Prints, for experts as tensors of their own (files) and stacked (modules),
// the time and the resident memory that the translated step takes:
//
//   files <shards> <milliseconds> <MB>       to modules
//   modules <shards> <milliseconds> <MB>     to files

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "core/base/strings.h"
#include "core/dialect/translate.h"
#include "formats/dialects/shipped.h"
#include "formats/families/shipped.h"

namespace ckptfs {
namespace {

constexpr uint64_t kLayers = 61, kDense = 3, kExperts = 256, kHidden = 7168, kFfn = 2048;

template <class T>
T Must(Result<T> result) {
  if (result) return *std::move(result);
  fprintf(stderr, "dialect_bench: %s\n", result.error().message.c_str());
  exit(1);
}

double ResidentMb() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0;
  file >> pages >> pages;
  return static_cast<double>(pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE))) / 1e6;
}

double Milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

// A tensor cut along its first dimension, a file a shard.
void Add(StepModel& step, std::string name, const Shape& shape, uint64_t shards, uint32_t layer) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.stage = StageRule::kLayer;
  parameter.layer = layer;
  Atom atom;
  atom.parameter = ParameterIndex{static_cast<uint32_t>(step.parameters.size())};
  atom.kind = "weight";
  atom.dtype = DType::kBF16;
  atom.shape = shape;
  Gather gather;
  Shape local = shape;
  local[0] /= shards;
  const uint64_t elements = ElementCount(local).value();
  for (uint32_t s = 0; s < shards; ++s) {
    LocalTensor held = WholeTensor(local);
    held.pieces.front().atom_begin[0] = s * local[0];
    gather.locals.push_back(std::move(held));
    gather.series.push_back({s, 1, 0, 0, elements, s, 0, 0, 0, DType::kBF16});
  }
  atom.source.gathers = {std::move(gather)};
  step.parameters.push_back(std::move(parameter));
  step.atoms.push_back(std::move(atom));
}

std::shared_ptr<const StepModel> MakeStep(bool files, uint64_t shards) {
  auto step = std::make_shared<StepModel>();
  step->blobs.resize(shards);
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::string at = StrCat("model.layers.", layer, ".");
    for (const char* name : {"q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"}) {
      Add(*step, StrCat(at, "self_attn.", name, ".weight"), {1536, kHidden}, shards, layer);
    }
    if (layer < kDense) continue;
    if (!files) {
      Add(*step, at + "mlp.experts.gate_up_proj", {kExperts, 2 * kFfn, kHidden}, shards, layer);
      Add(*step, at + "mlp.experts.down_proj", {kExperts, kHidden, kFfn}, shards, layer);
      continue;
    }
    for (uint64_t e = 0; e < kExperts; ++e) {
      const std::string expert = StrCat(at, "mlp.experts.", e, ".");
      Add(*step, expert + "gate_proj.weight", {kFfn, kHidden}, shards, layer);
      Add(*step, expert + "up_proj.weight", {kFfn, kHidden}, shards, layer);
      Add(*step, expert + "down_proj.weight", {kHidden, kFfn}, shards, layer);
    }
  }
  step->BuildIndex();
  return step;
}

int Main() {
  const DialectTable table = Must(ShippedDialect(Dialect::kHf5));
  const FamilySet families = Must(ShippedFamilies());
  for (const bool files : {true, false}) {
    for (const uint64_t shards : {uint64_t{1}, uint64_t{8}}) {
      const auto step = MakeStep(files, shards);
      malloc_trim(0);
      const double before = ResidentMb();
      const double start = Milliseconds();
      const ModelKind kind{"deepseek_v3", kExperts};
      const DialectEvidence found = FindDialect(*step, table, Dialect::kHf5, kind);
      const auto made = Must(Translate(*step, found, kind.sizes, families));
      const double took = Milliseconds() - start;
      printf("%s %d %.0f %.0f\n", files ? "files" : "modules", static_cast<int>(shards), took,
             ResidentMb() - before);
    }
  }
  return 0;
}

}  // namespace
}  // namespace ckptfs

int main() { return ckptfs::Main(); }
