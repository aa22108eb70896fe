// SPDX-License-Identifier: Apache-2.0
//
// `ckptfs read` answers a program that has no mount on its standard input and output
// (mount/control/step_answers.h).  The end of the input ends it.  A step that is not published is
// asked of the daemon that has it in memory; RUN/memory of all daemons with peers.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/store/lives.h"
#include "mount/commands/command_set.h"
#include "mount/commands/held_steps.h"
#include "mount/commands/peer_steps.h"
#include "mount/commands/step_access.h"
#include "mount/control/control_protocol.h"
#include "mount/control/step_answers.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr std::string_view kMemoryName = "memory";

struct ReadFlags {
  std::string step;
  std::string layout;
  std::string store;
  std::vector<std::string> roots;
  bool newest = false;
};

Status WriteOut(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail(ErrnoError(errno, "standard output"));
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

Status WriteOut(const std::string& text) {
  return WriteOut(std::as_bytes(std::span<const char>(text)));
}

// True if the step was saved as step `number`, at whichever attempt (N, N-1, ...).
bool IsAttemptOf(const StepRecord& step, const std::string& number) {
  const auto iteration = ParseCount(number);
  if (!iteration || *iteration != step.iteration) return false;
  if (step.id == number) return true;
  const std::string begin = number + "-";
  return step.id.starts_with(begin) && ParseCount(std::string_view(step.id).substr(begin.size()));
}

// The newest attempt of a step, as `latest` orders them; nothing if there is none.
std::optional<size_t> NewestAttempt(const std::string& number, std::span<const StepRecord> steps) {
  std::optional<size_t> newest;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!IsAttemptOf(steps[i], number)) continue;
    if (!newest || IsOlder(steps[*newest], steps[i])) newest = i;
  }
  return newest;
}

Result<StepRecord> FindPublished(Store& store, const ReadFlags& options,
                                 const StepReference& asked) {
  if (!options.newest) return store.Resolve(asked.run, asked.id);
  CKPT_RETURN_IF_ERROR(ParseCount(asked.id));
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> steps, store.Steps(asked.run));
  if (const auto newest = NewestAttempt(asked.id, steps)) return steps[*newest];
  return store.Resolve(asked.run, asked.id);  // its error says why not
}

// For a step that is not published.
std::optional<HeldStep> FindInMemory(const std::string& store, const ReadFlags& options,
                                     const StepReference& asked) {
  std::vector<HeldStep> steps;
  std::vector<StepRecord> records;
  for (HeldStep& step : FindHeldSteps(store).steps) {
    if (step.run() != asked.run) continue;
    records.push_back(step.AsRecord());
    steps.push_back(std::move(step));
  }
  std::optional<size_t> found;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (records[i].id == asked.id) found = i;
  }
  if (options.newest) found = NewestAttempt(asked.id, records);
  if (!found) return std::nullopt;
  return std::move(steps[*found]);
}

// ---- what a daemon answers -----------------------------------------------------

Status Gone() { return Fail(ErrorCode::kIo, "the daemon that has the step in memory went away"); }

// A line of the daemon's, with its LF.
Result<std::string> ReceiveHead(const Descriptor& daemon) {
  std::string head;
  for (char letter = 0; letter != '\n'; head += letter) {
    const ssize_t got = ::recv(daemon.get(), &letter, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Fail(Gone().error());
  }
  return head;
}

Status PassOn(const Descriptor& daemon, uint64_t bytes) {
  std::vector<std::byte> part(size_t{1} << 20);
  while (bytes > 0) {
    const ssize_t got =
        ::recv(daemon.get(), part.data(), std::min<uint64_t>(bytes, part.size()), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Gone();
    CKPT_RETURN_IF_ERROR(WriteOut(std::span(part).first(static_cast<size_t>(got))));
    bytes -= static_cast<uint64_t>(got);
  }
  return {};
}

Status Relay(const Descriptor& daemon) {
  for (std::string line; std::getline(std::cin, line);) {
    if (!SendMessage(daemon.get(), line)) return Gone();
    CKPT_ASSIGN_OR_RETURN(const std::string head, ReceiveHead(daemon));
    CKPT_RETURN_IF_ERROR(WriteOut(head));
    uint64_t bytes = 0;
    std::from_chars(head.data(), head.data() + head.size(), bytes);
    CKPT_RETURN_IF_ERROR(PassOn(daemon, bytes));
  }
  return {};
}

// --------------------------------------------------------------------------------

Status AnswerAll(StepAnswers& answers) {
  for (std::string line; std::getline(std::cin, line);) {
    const StepAnswers::Answer answer = answers.To(line);
    CKPT_RETURN_IF_ERROR(WriteOut(StepAnswers::HeadOf(answer)));
    if (answer) CKPT_RETURN_IF_ERROR(WriteOut(*answer));
  }
  return {};
}

// The id in RUN/memory/ID; empty for RUN/memory; nothing if the step is none of these.
std::optional<StepReference> InPeersMemory(std::string_view step) {
  const size_t slash = step.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  std::string_view id = step.substr(slash + 1);
  if (id != kMemoryName && !id.starts_with(StrCat(kMemoryName, "/"))) return std::nullopt;
  id.remove_prefix(std::min(id.size(), kMemoryName.size() + 1));
  return StepReference{std::string(step.substr(0, slash)), std::string(id)};
}

Status RunPeerRead(const ReadFlags& options, const StepReference& asked, const Layout& layout) {
  CKPT_RETURN_IF_ERROR(CheckName(asked.run, "run"));
  if (!asked.id.empty()) CKPT_RETURN_IF_ERROR(CheckName(asked.id, "step"));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  if (store->Resolve(asked.run, kMemoryName)) {
    return Refuse("run '", asked.run, "' has a step named ", kMemoryName,
                  ": which one is meant is not certain");
  }
  CKPT_ASSIGN_OR_RETURN(const PeerStep found, LoadPeerStep(*store, asked.run, asked.id));
  CKPT_ASSIGN_OR_RETURN(const auto answers,
                        StepAnswers::Open(found.step, layout, ReaderOptions(std::move(roots))));
  return AnswerAll(*answers);
}

Status RunRead(const ReadFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(options.layout));
  if (const auto memory = InPeersMemory(options.step)) return RunPeerRead(options, *memory, layout);
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  CKPT_ASSIGN_OR_RETURN(const StepReference asked, ParseStepReference(options.step));
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  auto record = FindPublished(*store, options, asked);
  if (!record && record.error().code == ErrorCode::kNotFound) {
    if (const auto held = FindInMemory(store->directory(), options, asked)) {
      const auto daemon = OpenReader(held->daemon, held->run(), held->id(), options.layout);
      if (daemon) return Relay(*daemon);
      if (daemon.error().code != ErrorCode::kNotFound) return Fail(Error(daemon.error()));
    }
    CKPT_RETURN_IF_ERROR(store->Refresh());  // it may have been published meanwhile
    record = FindPublished(*store, options, asked);
  }
  if (!record) return Fail(Error(record.error()));
  CKPT_ASSIGN_OR_RETURN(auto step, store->Load(*record));
  CKPT_ASSIGN_OR_RETURN(const auto answers, StepAnswers::Open(std::move(step), layout,
                                                              ReaderOptions(std::move(roots))));
  return AnswerAll(*answers);
}

}  // namespace

void AddReadCommand(CommandSet& commands) {
  auto options = std::make_shared<ReadFlags>();
  Command& command =
      commands.Add("read", "Answer a program's reads of a view on standard input and output");
  command.Add("STEP", options->step, "RUN/ID, RUN/memory or RUN/memory/ID")
      .Required()
      .Offers(kOfferSteps);
  command.Add("LAYOUT", options->layout, "Such as tp1")
      .Required()
      .Offers(kOfferNothing)
      .Check(Checked(Layout::Parse));
  AddStoreOption(command, options->store);
  command.Add("--newest", options->newest,
              "RUN/N: of the attempts that were saved as step N the newest");
  AddRootOption(command, options->roots);
  command.body = [options] { return RunRead(*options); };
}

}  // namespace ckptfs
