// SPDX-License-Identifier: Apache-2.0

#include "mount/control/step_readers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <span>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "mount/control/control_protocol.h"
#include "mount/control/step_answers.h"

namespace ckptfs {
namespace {

constexpr timeval kSlowest{60, 0};  // for a program to take what it asked for

Result<StepRecord> FindHeld(const StepCatalogue& catalogue, const std::string& run,
                            const std::string& id) {
  for (StepRecord& record : catalogue.held()) {
    if (record.run == run && record.id == id) return std::move(record);
  }
  return Fail(ErrorCode::kNotFound, StrCat(run, "/", id, " is not in memory"));
}

}  // namespace

StepReaders::~StepReaders() {
  MutexLock lock(mutex_);
  for (Reader& reader : readers_) ::shutdown(reader.connection.get(), SHUT_RDWR);
  for (Reader& reader : readers_) reader.thread.join();
}

Status StepReaders::Begin(Descriptor& connection, const std::string& run, const std::string& id,
                          const Layout& layout, const std::string& greeting) {
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, FindHeld(catalogue_, run, id));
  MutexLock lock(mutex_);
  readers_.remove_if([](Reader& reader) {
    if (!reader.over) return false;
    reader.thread.join();
    return true;
  });
  if (readers_.size() >= kMost) return Fail(ErrorCode::kExhausted, "too many programs read steps");
  ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &kSlowest, sizeof kSlowest);
  CKPT_RETURN_IF_ERROR(SendMessage(connection.get(), greeting));
  Reader& reader = readers_.emplace_back();
  reader.connection = std::move(connection);
  reader.thread = std::thread([this, &reader, record, layout] {
    (void)Caught([&]() -> Status {
      Serve(reader.connection.get(), record, layout);
      return {};
    });
    ::shutdown(reader.connection.get(), SHUT_RDWR);
    reader.over = true;
  });
  return {};
}

void StepReaders::Serve(int connection, const StepRecord& record, const Layout& layout) const {
  std::unique_ptr<StepAnswers> answers;
  for (;;) {
    pollfd event{connection, POLLIN, 0};
    const int ready = ::poll(&event, 1, answers ? static_cast<int>(idle_.count()) : -1);
    if (ready < 0 && errno != EINTR) return;
    if (ready == 0) answers.reset();
    if (ready <= 0) continue;
    const auto request = ReceiveMessage(connection, kMaxRequest);
    if (!request) return;
    const auto answer = Caught([&]() -> StepAnswers::Answer {
      CKPT_ASSIGN_OR_RETURN(auto step, catalogue_.Load(record));
      if (!answers || answers->step() != step) {
        answers.reset();
        CKPT_ASSIGN_OR_RETURN(answers, StepAnswers::Open(std::move(step), layout, {}));
      }
      return answers->To(*request);
    });
    const std::string head = StepAnswers::HeadOf(answer);
    if (!SendBytes(connection, std::as_bytes(std::span<const char>(head)))) return;
    if (answer && !SendBytes(connection, *answer)) return;
  }
}

}  // namespace ckptfs
