// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/shown_warnings.h"

#include <filesystem>
#include <utility>

#include "core/adopt/closed_file.h"
#include "core/adopt/step_notices.h"
#include "core/base/strings.h"
#include "core/check/source_state.h"
#include "core/store/model_of.h"
#include "core/view/view_set.h"
#include "mount/logging.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

// The step that /view shows, with its files.
struct Shown {
  StepRecord record;
  std::string name;  // RUN/ID
  std::shared_ptr<const Step> step;
  std::unique_ptr<BlobReader> blobs;
};

// `view_target`: "run/RUN/step/ID/view".  An error for a step that is only in memory, too.
Result<Shown> OpenShown(const ShownPlace& place) {
  const std::filesystem::path target(place.view_target);
  const std::string id = target.parent_path().filename();
  const std::string run = target.parent_path().parent_path().parent_path().filename();
  CKPT_ASSIGN_OR_RETURN(StepRecord record, place.store.Resolve(run, id));
  CKPT_ASSIGN_OR_RETURN(auto step, place.store.Load(record));
  BlobReader::Options reading;
  reading.roots = place.request.roots;
  auto blobs = BlobReader::Create(step->model, std::move(reading));
  std::string name = StrCat(record.run, "/", record.id);
  return Shown{std::move(record), std::move(name), std::move(step), std::move(blobs)};
}

// Names the layouts of --layout that the step does not have; they may be meant for later steps.
void WarnOfLayouts(const ShownPlace& place, const Shown& shown) {
  for (const Layout& layout : place.request.layouts) {
    const auto views = ViewSet::Open(ModelOf(shown.step), layout, place.formats);
    if (views->offer().Any()) continue;
    Log(LogLevel::kWarning, StrCat("--layout ", layout.ToString(), ": step ", shown.name, ": ",
                                   views->offer().Refusal().message));
  }
}

// Names the file that hides the step from users who are let in.
void WarnIfClosed(const Shown& shown) {
  StepNotices closed;
  closed.Add(shown.name, FindClosedFile(shown.step->model, *shown.blobs));
  for (const std::string& line : closed.Take()) Log(LogLevel::kWarning, line);
}

// A step whose files are gone, or are others now, cannot be read: the training that wrote them was
// removed, or wrote again.
void WarnIfGone(const Shown& shown) {
  const SourceReport sources = LookAtSources(shown.step->model, *shown.blobs);
  if (sources.state != SourceState::kMissing && sources.state != SourceState::kStale) return;
  Log(LogLevel::kWarning,
      StrCat("view: the files of ", shown.name, ", adopted from ", shown.record.source,
             ", are no longer there (", sources.reason,
             "): its training was removed or began again, and reads of it fail; "
             "`ckptfs remove --force ",
             ShellWord(shown.name), "` forgets it, `ckptfs switch` shows another step"));
}

}  // namespace

void WarnOfShown(const ShownPlace& place) {
  const auto shown = OpenShown(place);
  if (!shown) return Log(LogLevel::kWarning, shown.error().message);
  WarnOfLayouts(place, *shown);
  if (place.request.allow_other && place.request.adopt.empty()) {
    WarnIfClosed(*shown);  // else adopting told it
  }
  if (!place.adopted.contains(shown->name)) WarnIfGone(*shown);
}

}  // namespace ckptfs
