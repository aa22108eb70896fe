// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/fsdp/form.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "formats/megatron/common_state.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/fsdp/keys.h"
#include "formats/megatron/fsdp/reader.h"
#include "formats/megatron/fsdp/tensors.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kFormat = "fsdp_dtensor";

bool Has(const dcp::DcpMetadata& metadata, std::string_view object) {
  return std::ranges::find(metadata.objects, object, &dcp::ObjectEntry::name) !=
         metadata.objects.end();
}

// The job's own word decides, where it left one.
Result<bool> IsFsdp(dcp::StoredState& state) {
  const dcp::DcpMetadata& metadata = state.metadata();
  const bool model = std::ranges::any_of(metadata.tensors, [](const dcp::TensorEntry& tensor) {
    return FsdpKeyOf(tensor.name).of == FsdpKey::Of::kModel;
  });
  // Every save has these, whoever's loop trains.
  const bool counters = Has(metadata, "checkpoint_version") && Has(metadata, "iteration");
  if (!model || !counters) return false;
  if (!Has(metadata, kArguments)) return FsdpJobOf(metadata).has_value();
  auto common = ArgumentsOf(state);
  if (!common) {
    const ErrorCode code = common.error().code;
    if (code == ErrorCode::kInvalid || code == ErrorCode::kUnsupported) return false;
    return Fail(std::move(common).error());
  }
  const PickleRef format = (*common)->ArgumentOf("ckpt_format");
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
