// SPDX-License-Identifier: Apache-2.0
//
// Step access for several commands: loading a step by name or straight from a
// path, its blobs, and a progress bar for bulk jobs.
//
// Thread safety: used by the process's first thread only.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/store/store.h"
#include "formats/tools/model_files.h"
#include "mount/commands/command.h"
#include "mount/daemon/adoption.h"

namespace ckptfs {

// --root FROM=TO: where a directory of the manifest lies on this machine.
void AddRootOption(Command& command, std::vector<std::string>& roots);
Result<RootMap> ParseRoots(const std::vector<std::string>& words);

// --hf-config DIR: model files for steps that do not have a config.json.
void AddModelFilesOption(Command& command, std::string& directory);
Result<std::optional<ModelFiles>> GivenModelFiles(const std::string& directory);
// The directory whose model files a command takes: `given`, or else the one that a live mount of
// the store (at `mountpoint`, if that is not empty) was given, so that both say the same.  Empty if
// there is none, or if mounts were given several.
std::string ModelFilesOfMounts(const std::string& given, const std::string& store,
                               const std::string& mountpoint = "");

// Options to read a step's files, whose roots lie at `roots`; files that were touched are
// compared with their own checksums.
BlobReader::Options ReaderOptions(RootMap roots = {});

// --threads N.
void AddThreadsOption(Command& command, unsigned& threads, const std::string& description);

// `name` is RUN/ID; ID may be "latest".
Result<StepRecord> ResolveStep(Store& store, std::string_view name);

// The newest step of the checkpoint at the path `subject` without adopting it,
// or an adopted step (RUN/ID; RUN is RUN/latest).  A subject that exists as a file, or that
// cannot name a step, is a path.  kInvalid where a step beside the newest whole one is
// refused, since that may be newer.
Result<std::shared_ptr<const Step>> LoadSubject(const std::string& subject,
                                                const std::string& store,
                                                const IngestRequest& request);

// The same, and what there is beside it: of a path what was skipped or refused, of a run
// its steps.
struct LoadedSubject {
  std::shared_ptr<const Step> step;
  std::vector<std::string> skipped;  // "global_step20: incomplete: ..."
  std::vector<Error> refused;
  std::vector<StepRecord> steps;  // of the run, oldest first; none unless it was asked for
  std::vector<StepTag> tags;      // of the run
};
Result<LoadedSubject> LookAtSubject(const std::string& subject, const std::string& store,
                                    const IngestRequest& request);

// `given`, or if that is empty the latest step of the store's only run, or of several the step
// that its mounts show.
Result<std::string> OnlyStep(const std::string& given, const std::string& store);

// Says on standard error that the step's source is no longer there.
void WarnIfGone(Store& store, const StepRecord& record);

// A bar on stderr if that is a terminal, else nothing.
std::function<void(const JobProgress&)> ProgressBar(const std::string& what);

}  // namespace ckptfs
