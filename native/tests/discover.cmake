# Writes the ctest cases of one test program, after it was built: cmake -DPROGRAM=... -DNAME=... -DOUT=... -P discover.cmake
execute_process(COMMAND ${PROGRAM} --list OUTPUT_VARIABLE names OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" names "${names}")
set(cases "")
foreach(name IN LISTS names)
  string(APPEND cases "add_test([==[${NAME}.${name}]==] [==[${PROGRAM}]==] [==[${name}]==])\n")
endforeach()
file(WRITE ${OUT} "${cases}")
