// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/serving.h"

namespace ckptfs {
namespace {

ServingChoice Forced(const ServingQuestion& question) {
  switch (*question.forced) {
    case ServingMode::kStream: return {ServingMode::kStream, "asked for with --mode"};
    case ServingMode::kDirect:
      if (!question.whole_blob) return {ServingMode::kStream, "not a whole source file"};
      if (!question.passthrough) return {ServingMode::kStream, "no passthrough"};
      return {ServingMode::kDirect, "asked for with --mode"};
    case ServingMode::kMaterialise:
      if (!question.materialise) return {ServingMode::kStream, "no huge-page memory"};
      if (question.size == 0) return {ServingMode::kStream, "empty file"};
      return {ServingMode::kMaterialise, "asked for with --mode"};
  }
  return {};
}

}  // namespace

std::string_view ServingModeName(ServingMode mode) {
  switch (mode) {
    case ServingMode::kStream: return "stream";
    case ServingMode::kMaterialise: return "materialise";
    case ServingMode::kDirect: return "direct";
  }
  return "stream";
}

ServingChoice ChooseServing(const ServingQuestion& question) {
  if (question.forced) return Forced(question);
  if (question.size < kSmallFile) return {ServingMode::kStream, "small file"};
  if (!question.passthrough) return {ServingMode::kStream, "no passthrough"};
  if (question.whole_blob) return {ServingMode::kDirect, "a whole source file"};
  if (!question.materialise) return {ServingMode::kStream, "no huge-page memory"};
  if (question.read_once && !question.filled) {
    return {ServingMode::kStream, "its loader reads it once"};
  }
  if (question.size > question.budget) return {ServingMode::kStream, "larger than the budget"};
  return {ServingMode::kMaterialise, "fits the budget"};
}

bool ReadByCopy(Reading reading, uint64_t size) {
  return size >= kSmallFile && (reading == Reading::kCopied || reading == Reading::kOnce);
}

}  // namespace ckptfs
