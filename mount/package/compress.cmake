# SPDX-License-Identifier: Apache-2.0
#
# CPack runs it before it makes a package of the staged files: manuals and the changelog are
# compressed, as packages have them, and the same from one build to the next.
foreach(text usr/share/man/man1/ckptfs.1 usr/share/doc/ckptfs/changelog)
  set(path ${CPACK_TEMPORARY_INSTALL_DIRECTORY}/${text})
  if(EXISTS ${path})
    execute_process(COMMAND gzip -9nf ${path} COMMAND_ERROR_IS_FATAL ANY)
  endif()
endforeach()
