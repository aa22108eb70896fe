// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/fsdp/form.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "formats/megatron/common_state.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/fsdp/keys.h"
#include "formats/megatron/fsdp/reader.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kFormat = "fsdp_dtensor";

// Every save of Megatron's training has these.
constexpr std::string_view kObjects[] = {kArguments, "checkpoint_version", "iteration"};

bool HasObjects(const dcp::DcpMetadata& metadata) {
  return std::ranges::all_of(kObjects, [&](std::string_view name) {
    return std::ranges::find(metadata.objects, name, &dcp::ObjectEntry::name) !=
           metadata.objects.end();
  });
}

Result<bool> IsFsdp(dcp::StoredState& state) {
  const dcp::DcpMetadata& metadata = state.metadata();
  const bool model = std::ranges::any_of(metadata.tensors, [](const dcp::TensorEntry& tensor) {
    return FsdpKeyOf(tensor.name).of == FsdpKey::Of::kModel;
  });
  if (!model || !HasObjects(metadata)) return false;
  auto common = ArgumentsOf(state);
  if (!common) {
    const ErrorCode code = common.error().code;
    if (code == ErrorCode::kInvalid || code == ErrorCode::kUnsupported) return false;
    return Fail(std::move(common).error());
  }
  const PickleRef format = common->ArgumentOf("ckpt_format");
  return format && format.String() == kFormat;
}

}  // namespace

dcp::Form FsdpForm() {
  return {
      .is = IsFsdp,
      .read =
          [](const StepCandidate& step, const SourceOptions& options, dcp::StoredState& state,
             Assembler& assembler) { return FsdpReader(step, options, state, assembler).Read(); },
      .latest = ReadTracker};
}

}  // namespace ckptfs::megatron
