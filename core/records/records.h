// SPDX-License-Identifier: Apache-2.0
//
// Records are the small immutable texts by which a store knows its runs and
// steps, and their names in the Storage:
//
//   format                      the store's version and random identity
//   runs/<run>/<n>              n-th claim of a run's name: whose root it is
//   runs/<run>/<n>.settled      no step of another root is in the run
//   steps/<run>/<id>/<n>        n-th step published as <id>
//   deleted/<run>/<id>/<n>      that one is gone
//   steps/<run>/<id>/<n>.deleted   its record, when there was no room for a deletion
//   manifests/<digest>
//
//   record = JSON object, one line | "\n" | 16 hex letters, XXH3-64 of the line | "\n"
//
// n counts from 0.  The greatest n of a name counts; n + 1 is published only
// when n is deleted (or, of a run, empty), so no record is ever replaced and of
// concurrent publishers exactly one wins.  A step's record may go once its deletion is
// there, which stays: no n is used twice.
//
// Paths in records are percent-encoded, so that any bytes survive.
//
// Thread safety: values and pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/records/step_record.h"

namespace ckptfs {

inline constexpr uint64_t kRecordMaxBytes = 64 << 10;

// The parts of a "steps/..." or "deleted/..." name; nothing if it is neither.
struct StepName {
  std::string run;
  std::string id;
  uint64_t n = 0;
};
std::optional<StepName> ParseStepName(std::string_view name, std::string_view folder);
std::string StepRecordName(const StepName& name);
std::string DeletedName(const StepName& name);
// The other name of a step's record: the step is gone and its number is used.
std::string RetiredName(const StepName& name);
std::optional<StepName> ParseRetiredName(std::string_view name);
std::string ManifestName(const Digest& digest);
// The digest that a name spells; nothing if it is not one.
std::optional<Digest> DigestNamed(std::string_view name);
// A step of an id that is taken has the next free one: "<id>" for attempt 0, else
// "<id>-<attempt>".
inline constexpr int kMaxAttempts = 10000;
std::string AttemptId(std::string_view id, int attempt);
std::string ClaimName(const std::string& run, uint64_t n);

// kDataLoss when the bytes are not what was published, kUnsupported for a newer
// version.
Result<StepRecord> ParseStepRecord(std::string_view bytes, const StepName& name);
std::string RenderStepRecord(const StepRecord& record);

// The record that is published for a step, under the model's id.
StepRecord RecordOf(std::string_view run, const StepModel& model, const RenderedStep& rendered,
                    const std::string& source, const std::string& root);

// The version of a run's claim: a publisher that uses one knows that the number of a removed
// step may be among the deleted ones alone.
inline constexpr int kClaimVersion = 2;

// The root of a run's claim; the identity of the store.
Result<std::string> ParseText(std::string_view bytes, std::string_view key, int version = 1);
std::string RenderText(std::string_view key, std::string_view value, int version = 1);

}  // namespace ckptfs
